"""What is written under a figure. Every word comes from the folder's own files.

The study's own caption if it wrote one; else, in this order: how the numbers of that figure of the
paper compare, what came of the claims that name it, a finding that names it. The first figure of
a study may take the first claim with its verdict, or else the first finding.
"""

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

from kondo_lab.evidence import claims
from kondo_lab.evidence.html_report.words import shortened
from kondo_lab.evidence.result_folder import Result
from kondo_lab.evidence.study import ClaimVerdict

_SMALL = {"a", "and", "at", "by", "of", "per", "the", "to"}


def name_of(path: Path) -> str:
    """Return "fig 1: learning curves" for fig1-learning-curves.png."""
    words = re.sub(r"(?<!\de)[-_]", " ", path.stem)  # 3e-05 stays a number
    numbered = re.fullmatch(r"(fig|prop)(\d+[a-z]?)(.*)", words)
    if not numbered:
        return words[:1].upper() + words[1:]
    kind, number, rest = numbered.groups()
    begin = f"{'Figure' if kind == 'fig' else 'Proposition'} {number}"
    return f"{begin}:{rest}" if rest else begin


def captions(result: Result) -> dict[Path, str]:
    """Return what each figure shows; empty where the folder does not say. None is said twice."""
    told: dict[Path, str] = {}
    for path in result.figures:
        own = result.captions.get(path.stem)
        found = (shortened(each) for each in _candidates(path, result) if each)
        told[path] = (
            str(own) if own else next((each for each in found if each not in told.values()), "")
        )
    return told


def _candidates(path: Path, result: Result) -> Iterator[str]:
    yield _compared(path, result)
    yield _claimed(path, result)
    yield from _found(path, result)
    if path == result.figures[0]:
        if result.claims:
            first = result.claims[0]
            yield f"{first.verdict.capitalize()}: {first.statement} ({first.measured})."
        yield from map(str, result.manifest["findings"][:1])
        yield "" if result.older else str(result.manifest["claim"])


def _compared(path: Path, result: Result) -> str:
    """Return how the lines of headline.csv that have the figure's number compare."""
    numbered = re.match(r"(fig|prop)(\d+)", path.stem)
    if not numbered:
        return ""
    wanted = rf"\b{numbered[1]}\w*\.? {numbered[2]}(?!\d)"
    lines = [line for line in result.headline if re.search(wanted, line.figure, re.I)]
    judged = [line for line in lines if line.verdict]
    if not judged:
        return ""
    figure = re.sub(r"(?<=\d)[a-z]$", "", judged[0].figure)
    if all(line.verdict == "matches" for line in judged):
        return f"Compared with {figure}: {len(judged)} of {len(judged)} match."
    return f"Compared with {figure}: {claims.by_lines('', judged).measured}."


def _claimed(path: Path, result: Result) -> str:
    """Return what came of the claims on the subject of a figure: table-SUBJECT, curves-SUBJECT."""
    subject = path.stem.partition("-")[2]
    own = [
        claim
        for claim in result.claims
        if subject and re.match(rf"{re.escape(subject)}[,:]", claim.statement.replace("%:", ":"))
    ]
    if not own:
        return ""
    counts = Counter(claim.verdict for claim in own)
    told = ", ".join(f"{counts[each]} {each}" for each in get_args(ClaimVerdict) if counts[each])
    return f"Statements on {subject}: {told}."


def _found(path: Path, result: Result) -> Iterator[str]:
    """Yield the findings with all words of the figure's name."""
    words = [
        word.lower().rstrip("s")
        for word in re.split(r"[-_ ]", path.stem)
        if word.lower() not in _SMALL
    ]
    for finding in map(str, result.manifest["findings"]):
        if all(re.search(rf"\b{re.escape(word)}", finding, re.I) for word in words):
            yield finding
