"""`kondo report`: one HTML page from result folders. It needs nothing from anywhere else.

The page's skeleton, style and script lie in assets/. Without script everything but the frontier
can be read; the filter "only what differs" is style alone.
"""

import base64
import json
import math
import re
import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any, get_args

from kondo.run_files import atomically
from kondo_lab.studies.result_folder import Result, read
from kondo_lab.studies.study import ClaimVerdict, Headline

VERDICTS = {
    "matches": ("matches", "match"),
    "noisy": ("too noisy to tell", "too noisy to tell"),
    "differs": ("differs", "differ"),
    "": ("no expected number", "no expected number"),
}
"""Verdict -> what the page says of one line and of several."""
_SHOWN_ELSEWHERE = ("title", "paper", "claim", "findings", "differences", "settings", "environment")
_ASSETS = files("kondo_lab.studies") / "assets"


def write(folders: Sequence[Path], out: Path) -> None:
    """Write the page that shows `folders`, in their order, to the file `out`.

    Equal folders give equal bytes: the page says nothing of when or where it was written.

    Raises:
        ValueError: a folder is not a result folder; the message names what is missing.
    """
    if not folders:
        raise ValueError("folders: expected at least one result folder, got none. Run a study.")
    page = _page([read(Path(folder)) for folder in folders])
    with atomically(out) as partial:
        # As bytes: text mode would write other line ends elsewhere.
        partial.write_bytes(page.encode())


def _page(results: Sequence[Result]) -> str:
    anchors = _anchors(results)
    template = Template(_asset("report.html"))
    return template.substitute(
        style=_asset("report.css"),
        script=_asset("report.js"),
        small=_small_note(results),
        claims=_all_claims(results),
        tiles=_tiles(results),
        contents="\n".join(map(_contents_line, results, anchors)),
        frontier_hidden="" if any(result.frontier for result in results) else " hidden",
        frontier=_embedded(_frontier(results)),
        studies="\n".join(map(_study, results, anchors)),
    )


def _asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")


def _anchors(results: Sequence[Result]) -> list[str]:
    """Return an id per study, also when a study is there twice."""
    seen: Counter[str] = Counter()
    anchors = []
    for result in results:
        name = re.sub(r"[^a-z0-9]+", "-", str(result.manifest["study"]).lower()).strip("-")
        seen[name] += 1
        anchors.append(f"study-{name}" + (f"--{seen[name]}" if seen[name] > 1 else ""))
    return anchors


# The top of the page.


def _small_note(results: Sequence[Result]) -> str:
    count = sum(result.small for result in results)
    if not count:
        return ""
    which = "All of these runs are" if count == len(results) else f"{count} of {len(results)} are"
    return (
        f'<p class="note warn"><strong>{which} small runs.</strong> They show that the '
        "program works; their numbers mean little, and so do their verdicts.</p>"
    )


def _all_claims(results: Sequence[Result]) -> str:
    """Return how many claims of all studies are met, missed and open."""
    chips = _claim_chips(results)
    return f"<p>Claims of the studies: {chips}</p>" if chips else ""


def _tiles(results: Sequence[Result]) -> str:
    """Return how many numbers agree with a paper, and apart from them with anything else."""
    lines = [line for result in results for line in result.headline]
    papers: Counter[str] = Counter(line.verdict for line in lines if line.against == "paper")
    others: Counter[str] = Counter(line.verdict for line in lines if line.against != "paper")
    checks = sum(others.values()) - others[""]
    tiles = {
        "matches": (str(papers["matches"]), "match the paper"),
        "noisy": (str(papers["noisy"]), "are compatible with it, too noisy to tell"),
        "differs": (str(papers["differs"]), "differ from the paper"),
        "other": (f"{others['matches']} of {checks}", "match a formula, simulation or third party"),
        "": (str(others[""]), "have no expected number"),
    }
    return "\n".join(
        f'<div class="tile {verdict or "none"}"><span class="count" data-verdict="{verdict}">'
        f"{count}</span> <span>{label}</span></div>"
        for verdict, (count, label) in tiles.items()
    )


def _contents_line(result: Result, anchor: str) -> str:
    manifest = result.manifest
    return (
        f'<li><a href="#{anchor}">{_text(manifest["title"])}</a> {_small_badge(result)}'
        f'<span class="quiet">{_text(manifest["paper"])}</span> {_claim_chips([result])} '
        f"{_chips(result.headline)}</li>"
    )


def _chips(lines: Sequence[Headline]) -> str:
    counts: Counter[str] = Counter(line.verdict for line in lines)
    chips = [
        f'<span class="verdict {verdict or "none"}">{counts[verdict]} '
        f"{one if counts[verdict] == 1 else several}</span>"
        for verdict, (one, several) in VERDICTS.items()
        if counts[verdict]
    ]
    return f'<span class="chips">{" ".join(chips)}</span>'


def _small_badge(result: Result) -> str:
    return '<span class="badge">small run</span> ' if result.small else ""


def _frontier(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Return one choice per study, task and target, with its series; JSON has no NaN."""
    choices: dict[tuple[int, str, str], dict[str, Any]] = {}
    for number, result in enumerate(results):
        for point in result.frontier:
            about = {"task": point.task, "target": point.target, "study": result.manifest["study"]}
            choice = choices.setdefault(
                (number, point.task, point.target),
                about | {"small": result.small, "points": []},
            )
            values = point._asdict().items()
            lost = {k: None for k, v in values if isinstance(v, float) and not math.isfinite(v)}
            choice["points"].append(point._asdict() | lost)
    return list(choices.values())


def _embedded(value: Any) -> str:
    """Return JSON that cannot end the script element it stands in."""
    text = json.dumps(value, allow_nan=False)
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text


# A study.


def _study(result: Result, anchor: str) -> str:
    manifest = result.manifest
    figures = "".join(_figure(path, result) for path in result.figures)
    return Template(_asset("study.html")).substitute(
        anchor=anchor,
        title=_text(manifest["title"]),
        badge=_small_badge(result),
        study=_text(manifest["study"]),
        paper=_text(manifest["paper"]),
        claim=_text(manifest["claim"]),
        claims=_claims(result),
        warnings=_warnings(result),
        figures=f'<div class="figures">{figures}</div>' if figures else "",
        chips=_chips(result.headline),
        table=_table(result.headline),
        findings=_section("Findings", manifest["findings"]),
        differences=_section("Differences from the paper", manifest["differences"]),
        run=_definitions(_flat({k: v for k, v in manifest.items() if k not in _SHOWN_ELSEWHERE})),
        environment=_definitions(_flat(manifest["environment"])),
        settings=_definitions(_flat(manifest["settings"])),
    )


def _claims(result: Result) -> str:
    """Return every claim with what came of it, before all else that a study shows."""
    if not result.claims:
        return '<p class="quiet">No verdicts on this claim are in the folder.</p>'
    items = "".join(
        f'<li><span class="verdict {claim.verdict}">{claim.verdict}</span> '
        f'{_text(claim.statement)} <span class="quiet">({_text(claim.measured)})</span></li>'
        for claim in result.claims
    )
    return f'<ul class="claims">{items}</ul>'


def _claim_chips(results: Sequence[Result]) -> str:
    counts = Counter(claim.verdict for result in results for claim in result.claims)
    chips = [
        f'<span class="verdict {verdict}">{counts[verdict]} {verdict}</span>'
        for verdict in get_args(ClaimVerdict)
        if counts[verdict]
    ]
    return f'<span class="chips">{" ".join(chips)}</span>' if chips else ""


def _warnings(result: Result) -> str:
    warnings = []
    if result.small:
        warnings.append(
            "<strong>Small run.</strong> It shows that the study works; numbers mean little."
        )
    if result.manifest["interrupted"]:
        warnings.append("<strong>Interrupted.</strong> Only what had finished is shown.")
    return "\n".join(f'<p class="note warn">{warning}</p>' for warning in warnings)


def _figure(path: Path, result: Result) -> str:
    name = path.stem.replace("-", " ").replace("_", " ")
    alt = _text(f"{result.manifest['title']}: figure {name}")
    image = path.read_bytes()
    width, height = struct.unpack(">II", image[16:24])  # the first numbers of a PNG's first chunk
    # Panels side by side would be too small in half the page.
    kind = "wide" if width > 1.9 * height else "plain"
    return (
        f'<figure class="{kind}"><button type="button" class="enlarge" aria-label="Enlarge {alt}">'
        f'<img alt="{alt}" width="{width}" height="{height}" '
        f'src="data:image/png;base64,{base64.b64encode(image).decode()}"></button>'
        f"<figcaption>{_text(name)}</figcaption></figure>"
    )


def _table(lines: Sequence[Headline]) -> str:
    """Return one table, with a body per figure and metric."""
    if not lines:
        return "<p>No numbers to compare.</p>"
    groups: dict[tuple[str, str], list[Headline]] = {}
    figures = list(dict.fromkeys(line.figure for line in lines))
    # A figure's lines need not stand together in the file.
    for line in sorted(lines, key=lambda line: figures.index(line.figure)):
        groups.setdefault((line.figure, line.metric), []).append(line)
    head = "".join(f'<th scope="col">{header}</th>' for header in _HEADERS)
    bodies = "\n".join(_body(*names, group) for names, group in groups.items())
    nothing = '<p class="nothing-differs">Nothing differs in this study.</p>'
    return (
        '<div class="scroll" role="region" aria-label="Paper and ours" tabindex="0">'
        f'<table class="comparison"><thead><tr>{head}</tr></thead>\n{bodies}</table></div>\n'
        + ("" if any(line.verdict == "differs" for line in lines) else nothing)
    )


_HEADERS = ("series", "at", "expected", "against", "ours ± se", "difference", "verdict", "seeds")


def _body(figure: str, metric: str, lines: Sequence[Headline]) -> str:
    return (
        f'<tbody><tr class="group"><th scope="rowgroup" colspan="{len(_HEADERS)}"><span>'
        f"{_text(figure)}: {_text(metric)} {_chips(lines)}</span></th></tr>\n"
        f"{''.join(map(_row, lines))}</tbody>"
    )


def _row(line: Headline) -> str:
    kind = line.verdict or "none"
    cells = (
        _place(line.x),
        "" if line.expected is None else _number(line.expected),
        line.against,
        _with_error(line.ours, line.se),
        _relative(line),
        f'<span class="verdict {kind}">{VERDICTS[line.verdict][0]}</span>',
        str(line.seeds),
    )
    inside = "".join(f"<td>{cell}</td>" for cell in cells)
    return f'<tr class="line {kind}"><th scope="row">{_text(line.series)}</th>{inside}</tr>\n'


def _section(title: str, sentences: Sequence[str]) -> str:
    if not sentences:
        return ""
    items = "".join(f"<li>{_text(sentence)}</li>" for sentence in sentences)
    return f"<h3>{title}</h3>\n<ul>{items}</ul>"


# Words and numbers.


def _text(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(_text, value))
    return escape(str(value))


def _definitions(items: Mapping[str, Any]) -> str:
    return "\n".join(f"<dt>{_text(k)}</dt><dd>{_text(v)}</dd>" for k, v in items.items())


def _flat(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings as one level: "network: width", ..."""
    flat: dict[str, Any] = {}
    for name, value in nested.items():
        label = f"{prefix}{name.replace('_', ' ')}"
        flat |= _flat(value, f"{label}: ") if isinstance(value, Mapping) else {label: value}
    return flat


def _number(value: float) -> str:
    """Four digits; whole numbers in full, with thousands set apart."""
    if math.isnan(value):
        return "none"
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    whole = value.is_integer() or abs(value) >= 1e3
    return f"{value:,.0f}" if whole and abs(value) < 1e12 else f"{value:.4g}"


def _place(x: float | str) -> str:
    """Return where on the figure's axis: a number like all others, or what the file says."""
    try:
        return _number(float(x))
    except ValueError:
        return _text(x)


def _with_error(value: float, se: float | None) -> str:
    """Return "0.0236 ± 0.0004": both to the second digit of the error."""
    if se is None or not (0 < se < math.inf and math.isfinite(value)):
        return _number(value) + ("" if se is None else f" ± {_number(se)}")
    decimals = max(0, 1 - math.floor(math.log10(se)))
    if decimals > 8:
        return f"{value:.4g} ± {se:.2g}"
    return f"{value:,.{decimals}f} ± {se:,.{decimals}f}"


def _relative(line: Headline) -> str:
    if not line.expected or not math.isfinite(line.ours):
        return ""
    percent = round(100 * (line.ours - line.expected) / abs(line.expected))
    return f"{percent:+d}%" if percent else "0%"
