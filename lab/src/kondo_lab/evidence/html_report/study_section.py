"""One study of the page: claim, verdict, figure and three numbers; all else is folded."""

from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from string import Template

from kondo_lab.evidence.html_report import captions, tables
from kondo_lab.evidence.html_report.images import Picture
from kondo_lab.evidence.html_report.words import count, definitions, flat, shortened, text
from kondo_lab.evidence.result_folder import MANIFEST, Result
from kondo_lab.evidence.study import Claim

_ASSETS = files("kondo_lab.evidence") / "assets"
_SHOWN_ELSEWHERE = (
    *("title", "paper", "claim", "findings", "differences", "settings", "environment"),
    *("captions", "figures", "seconds_by_part", "finished_parts", "study", "version"),
)
OPEN_STATEMENTS, OPEN_LETTERS = 4, 800
"""A study with more statements than these, or longer ones, folds them."""
MOST_STATEMENTS, MOST_FINDINGS, MOST_SETTINGS = 80, 15, 40


def asset(name: str) -> str:
    """Return a file of assets/."""
    return (_ASSETS / name).read_text(encoding="utf-8")


def section(
    result: Result,
    anchor: str,
    pictures: Mapping[Path, Picture],
    *,
    level: int,
    first: bool,
    claims: bool = True,
) -> str:
    """Return the article of a study.

    Args:
        level: of its heading.
        first: whether its figure is the first of the page, which is shown without delay.
        claims: whether it lists its claims; the page may have done so.
    """
    manifest = result.manifest
    told = captions.captions(result)
    figures = [
        _figure(path, result, pictures[path], told[path], eager=first and not place)
        for place, path in enumerate(result.figures)
    ]
    wide = not figures or pictures[result.figures[0]].wide
    return Template(asset("study.html")).substitute(
        anchor=anchor,
        level=level,
        title=text(manifest["title"]),
        badge=small_badge(result),
        about=_about(result),
        warnings=_warnings(result),
        claim=text(manifest["claim"]),
        verdict=verdict(result),
        shape="wide" if wide else "beside",
        figure="".join(figures[:1]),
        cards=tables.cards(result.headline, str(manifest["study"])),
        statements=statements(result.claims) if claims and _few(result.claims) else "",
        folds=_folds(result, figures[1:], level + 1, claims=claims and not _few(result.claims)),
    )


def small_badge(result: Result) -> str:
    """Return a mark for a run that only showed that it works."""
    return '<span class="badge">small run</span> ' if result.small else ""


def verdict(result: Result) -> str:
    """Return what came of the study: its claims, or else how its numbers compare."""
    if result.claims:
        return tables.claim_chips(result.claims)
    if result.older:
        return '<span class="verdict none">no claim</span>'
    compared = [line for line in result.headline if line.verdict]
    numbers = f"; its numbers: {tables.chips(compared)}" if compared else ""
    return f'<span class="quiet">No verdict in the folder{numbers}</span>'


def _about(result: Result) -> str:
    manifest = result.manifest
    where = [text(manifest["device"])] if "device" in manifest else []
    return " &middot; ".join([text(manifest["paper"]), f"<code>{text(result.name)}</code>", *where])


def _warnings(result: Result) -> str:
    warnings = []
    if result.small:
        warnings.append(
            "<strong>Small run.</strong> It shows that the study works; numbers mean little."
        )
    if result.manifest["interrupted"]:
        warnings.append("<strong>Interrupted.</strong> Only what had finished is shown.")
    made = [f'<p class="note warn">{warning}</p>' for warning in warnings]
    if result.older:
        made.append(
            f'<p class="note"><strong>Not of <code>kondo run</code>:</strong> {text(result.older)} '
            "wrote this folder.</p>"
        )
    return "\n".join(made)


def _figure(path: Path, result: Result, picture: Picture, told: str, *, eager: bool) -> str:
    name = captions.name_of(path)
    alt = f"{result.manifest['title']}. {name}." + (f" {shortened(told, 160)}" if told else "")
    loading = "" if eager else ' loading="lazy"'
    kind = f"{'wide' if picture.wide else 'plain'}{' large' if picture.large else ''}"
    return (
        f'<figure class="{kind}"><div class="plate"><img alt="{text(alt)}" '
        f'width="{picture.width}" height="{picture.height}"{loading} decoding="async" '
        f'src="{picture.source}"></div><figcaption><b>{text(name)}.</b> {text(told)}</figcaption>'
        "</figure>"
    )


def _folds(result: Result, more: Sequence[str], level: int, *, claims: bool) -> str:
    manifest = result.manifest
    compared = [line for line in result.headline if line.verdict]
    findings = [str(finding) for finding in manifest["findings"]]
    statement_count = (
        f"{count(len(result.claims), 'statement')} {tables.claim_chips(result.claims)}"
    )
    lines = f"Numbers: {count(len(compared), 'compared line')} of {len(result.headline):,}"
    return "\n".join(
        [
            _fold("statements", statement_count, statements(result.claims)) if claims else "",
            _fold("more-figures", count(len(more), "more figure"), "".join(more)),
            _fold(
                "numbers",
                f"{lines} {tables.chips(compared) if compared else ''}",
                tables.comparison(result.headline),
            ),
            _fold("findings", count(len(findings), "finding"), _list(findings, MOST_FINDINGS)),
            _fold(
                "differences",
                f"Differences from the paper ({len(manifest['differences'])})",
                _list(manifest["differences"], MOST_FINDINGS),
            ),
            _fold("run", "Run: command, versions, device, settings", _run(result, level)),
        ]
    )


def _fold(kind: str, title: str, content: str) -> str:
    """Return a closed part of an article; nothing if it has no content."""
    if not content:
        return ""
    return (
        f'<details class="fold {kind}"><summary>{title}</summary>\n'
        f'<div class="folded">{content}</div></details>'
    )


def _few(claims: Sequence[Claim]) -> bool:
    letters = sum(len(claim.statement) + len(claim.measured) for claim in claims)
    return len(claims) <= OPEN_STATEMENTS and letters <= OPEN_LETTERS


def statements(claims: Sequence[Claim]) -> str:
    """Return every claim with what came of it and the numbers behind it."""
    if not claims:
        return ""
    items = "".join(map(_statement, claims[:MOST_STATEMENTS]))
    more = len(claims) - MOST_STATEMENTS
    items += f"<li>{more} more are in claims.csv of the folder.</li>" if more > 0 else ""
    return f'<ul class="claims">{items}</ul>'


def _statement(claim: Claim) -> str:
    return (
        f'<li><span class="verdict {claim.verdict}">{claim.verdict}</span> '
        f'<span>{text(claim.statement)} <span class="quiet">({text(claim.measured)})</span>'
        "</span></li>"
    )


def _list(sentences: Sequence[str], most: int) -> str:
    if not sentences:
        return ""
    items = [f"<li>{text(sentence)}</li>" for sentence in sentences[:most]]
    if len(sentences) > most:
        items.append(f"<li>{len(sentences) - most} more are in {MANIFEST} of the folder.</li>")
    return f"<ul>{''.join(items)}</ul>"


def _run(result: Result, level: int) -> str:
    manifest = result.manifest
    where = f"{MANIFEST} of the folder"
    own = {key: value for key, value in manifest.items() if key not in _SHOWN_ELSEWHERE}
    parts = {"Run": own, "Environment": manifest["environment"], "Settings": manifest["settings"]}
    return "\n".join(
        f"<h{level}>{title}</h{level}>\n"
        f"<dl>{definitions(flat(values), most=MOST_SETTINGS, where=where)}</dl>"
        for title, values in parts.items()
        if values
    )
