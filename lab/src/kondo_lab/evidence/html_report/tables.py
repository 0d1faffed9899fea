"""The numbers of a study: the three that are shown first, and the table with the others."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import get_args

from kondo_lab.evidence.html_report.layout import PICKS
from kondo_lab.evidence.html_report.words import number, place, relative, text, with_error
from kondo_lab.evidence.result_folder import HEADLINE
from kondo_lab.evidence.study import Claim, ClaimVerdict, Headline

VERDICTS = {
    "matches": ("matches", "match"),
    "noisy": ("too noisy to tell", "too noisy to tell"),
    "differs": ("differs", "differ"),
    "": ("no expected number", "no expected number"),
}
"""Verdict -> what the page says of one line and of several."""
KEY_NUMBERS = 3
MOST_ALONE = 24
"""Lines without an expected number that a table shows; headline.csv has them all."""
# What a study is about, most specific first: the series whose number is shown.
_SUBJECTS = ("DG-K", "unbiased", "free", "DG")
_HEADERS = ("series", "at", "expected", "against", "ours ± se", "difference", "verdict", "seeds")


def key_numbers(lines: Sequence[Headline], study: str = "") -> list[Headline]:
    """Return at most three lines to show first.

    Those of `layout.PICKS` if it names the study. Then one per figure, of those whose number a
    paper gives, then of those with another expected number. Where there are fewer than three, the
    first metric that is compared with nothing fills up with the first of its series.
    """
    usable = [line for line in lines if not line.metric.startswith("order of")]
    usable = [line for line in usable if math.isfinite(line.ours)]
    compared = [line for line in usable if line.against == "paper"]
    compared += [line for line in usable if line.expected is not None and line.against != "paper"]
    figures: dict[str, list[Headline]] = {}
    for line in compared:
        own = figures.setdefault(line.figure, [])
        if not own or own[0].metric == line.metric:
            own.append(line)
    chosen = [line for pick in PICKS.get(study, ()) for line in usable if pick.finds(line)]
    chosen += [_representative(own) for own in figures.values()]
    alone = [line for line in usable if line.expected is None]
    first = [line for line in alone if line.metric == alone[0].metric]
    gated = [line for line in first if _subject(line) < len(_SUBJECTS)]
    more = first if any(line in first[:KEY_NUMBERS] for line in gated) else first[:1] + gated
    return list(dict.fromkeys(chosen + more))[:KEY_NUMBERS]


def _subject(line: Headline) -> int:
    found = [place for place, name in enumerate(_SUBJECTS) if line.series.startswith(name)]
    return found[0] if found else len(_SUBJECTS)


def _representative(lines: Sequence[Headline]) -> Headline:
    """Return the line of the study's subject that is farthest along the figure's axis."""
    best = min(map(_subject, lines))
    return max((line for line in lines if _subject(line) == best), key=_along)


def _along(line: Headline) -> float:
    try:
        return float(line.x)
    except ValueError:
        return -math.inf


def _position(x: float | str) -> str:
    """Return "x = 8" for a number on an axis, and words as they are."""
    try:
        return f"x = {number(float(x))}"
    except ValueError:
        return text(x)


def cards(lines: Sequence[Headline], study: str) -> str:
    """Return the key numbers, each with what it is and what was expected."""
    made = []
    chosen = key_numbers(lines, study)
    several = len({line.figure for line in chosen}) > 1
    for line in chosen:
        at = "" if line.x == "" else f", {_position(line.x)}"
        figure = f"{text(line.figure)}. " if several else ""
        verdict = VERDICTS[line.verdict][0]
        against = "" if line.expected is None else f"{text(line.against)}: {number(line.expected)}"
        chip = f'<span class="verdict {line.verdict}">{verdict}</span>' if line.verdict else ""
        expected = f'<span class="quiet">{against} {chip}</span>' if against else ""
        made.append(
            f'<li><strong class="value">{with_error(line.ours, line.se)}</strong>'
            f"<span>{figure}{text(line.series)}: {text(line.metric)}{at}</span>{expected}</li>"
        )
    return f'<ul class="cards" aria-label="Key numbers">{"".join(made)}</ul>' if made else ""


def chips(lines: Sequence[Headline]) -> str:
    """Return how many lines match, differ, ..."""
    counts: Counter[str] = Counter(line.verdict for line in lines)
    made = [
        f'<span class="verdict {verdict or "none"}">{counts[verdict]:,} '
        f"{one if counts[verdict] == 1 else several}</span>"
        for verdict, (one, several) in VERDICTS.items()
        if counts[verdict]
    ]
    return f'<span class="chips">{" ".join(made)}</span>'


def claim_chips(claims: Sequence[Claim]) -> str:
    """Return how many claims are met, missed and open."""
    counts = Counter(claim.verdict for claim in claims)
    made = [
        f'<span class="verdict {verdict}">{counts[verdict]} {verdict}</span>'
        for verdict in get_args(ClaimVerdict)
        if counts[verdict]
    ]
    return f'<span class="chips">{" ".join(made)}</span>' if made else ""


def comparison(lines: Sequence[Headline]) -> str:
    """Return one table, with a body per figure and metric.

    Lines that are compared with something are all shown, of the others the first few.
    """
    if not lines:
        return "<p>No numbers to compare.</p>"
    alone = [line for line in lines if not line.verdict]
    shown = [line for line in lines if line.verdict or line in alone[:MOST_ALONE]]
    groups: dict[tuple[str, str], list[Headline]] = {}
    figures = list(dict.fromkeys(line.figure for line in shown))
    # A figure's lines need not stand together in the file.
    for line in sorted(shown, key=lambda line: figures.index(line.figure)):
        groups.setdefault((line.figure, line.metric), []).append(line)
    head = "".join(f'<th scope="col">{header}</th>' for header in _HEADERS)
    bodies = "\n".join(_body(*names, group) for names, group in groups.items())
    left_out = len(lines) - len(shown)
    notes = [
        "" if any(line.verdict == "differs" for line in lines) else _NOTHING_DIFFERS,
        f'<p class="quiet">{left_out:,} more lines without an expected number are in {HEADLINE} '
        "of the folder.</p>"
        if left_out
        else "",
    ]
    return (
        '<div class="scroll" role="region" aria-label="Expected numbers and ours" tabindex="0">'
        f'<table class="comparison"><thead><tr>{head}</tr></thead>\n{bodies}</table></div>\n'
        + "".join(notes)
    )


_NOTHING_DIFFERS = '<p class="nothing-differs">Nothing differs in this study.</p>'


def _body(figure: str, metric: str, lines: Sequence[Headline]) -> str:
    return (
        f'<tbody><tr class="group"><th scope="rowgroup" colspan="{len(_HEADERS)}"><span>'
        f"{text(figure)}: {text(metric)} {chips(lines)}</span></th></tr>\n"
        f"{''.join(map(_row, lines))}</tbody>"
    )


def _row(line: Headline) -> str:
    kind = line.verdict or "none"
    cells = (
        place(line.x),
        "" if line.expected is None else number(line.expected),
        line.against,
        with_error(line.ours, line.se),
        relative(line),
        f'<span class="verdict {kind}">{VERDICTS[line.verdict][0]}</span>',
        str(line.seeds),
    )
    inside = "".join(f"<td>{cell}</td>" for cell in cells)
    return f'<tr class="line {kind}"><th scope="row">{text(line.series)}</th>{inside}</tr>\n'
