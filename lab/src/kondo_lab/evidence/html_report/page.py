"""The whole page: claims and verdicts, then the studies by group, then the frontier's controls."""

import dataclasses
import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any, get_args

from kondo_lab.evidence.html_report import images, layout, study_section, tables
from kondo_lab.evidence.html_report.images import Picture
from kondo_lab.evidence.html_report.layout import EARLIER, Group
from kondo_lab.evidence.html_report.study_section import asset, small_badge, statements, verdict
from kondo_lab.evidence.html_report.words import text
from kondo_lab.evidence.result_folder import Result
from kondo_lab.evidence.study import ClaimVerdict

Arranged = Sequence[tuple[Group, Sequence[Result]]]
MOST_EARLIER = 1
"""Figures that are shown of an earlier version."""


def page(results: Sequence[Result]) -> str:
    """Return the page that shows `results`, in the order of `layout`."""
    arranged = [(group, _shown(group, own)) for group, own in layout.arrange(results)]
    ordered = [result for _, group in arranged for result in group]
    current = [result for group, own in arranged if group is not EARLIER for result in own]
    anchors = dict(zip(map(id, ordered), _anchors(ordered), strict=True))
    pictures = images.encode(
        [(path, path == own.figures[0]) for own in ordered for path in own.figures]
    )
    single = len(ordered) == 1
    return Template(asset("report.html")).substitute(
        style=asset("report.css"),
        script=asset("report.js"),
        lead="" if single else _LEAD,
        bar=_bar(arranged, current),
        small=_small_note(ordered),
        tiles="" if single else f'<div class="tiles">\n{_tiles(current)}\n</div>',
        overview=statements(ordered[0].claims) if single else _overview(arranged, anchors),
        filter_hidden=""
        if any(line.verdict for r in ordered for line in r.headline)
        else " hidden",
        groups=_groups(arranged, anchors, pictures, single=single),
        frontier_hidden="" if any(result.frontier for result in current) else " hidden",
        frontier=_embedded(_frontier(current)),
    )


_LEAD = (
    '<p class="lead">The claims of the Kondo-gate and Delightful-PG papers, and of this project, '
    "each with its verdict and its numbers.</p>"
)


def _shown(group: Group, results: Sequence[Result]) -> Sequence[Result]:
    if group is not EARLIER:
        return results
    return [dataclasses.replace(own, figures=own.figures[:MOST_EARLIER]) for own in results]


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


def _bar(arranged: Arranged, current: Sequence[Result]) -> str:
    links = [("claims", "Claims")]
    if len(arranged) > 1:
        links += [(f"group-{group.name}", group.short) for group, _ in arranged]
    if any(result.frontier for result in current):
        links.append(("frontier", "Frontier"))
    if len(links) == 1:
        return ""
    inside = "\n".join(f'<a href="#{anchor}">{title}</a>' for anchor, title in links)
    return f'<nav class="bar" aria-label="Sections">\n{inside}\n</nav>'


def _small_note(results: Sequence[Result]) -> str:
    small = sum(result.small for result in results)
    if not small:
        return ""
    which = "All of these runs are" if small == len(results) else f"{small} of {len(results)} are"
    return (
        f'<p class="note warn"><strong>{which} small runs.</strong> They show that the '
        "program works; their numbers mean little, and so do their verdicts.</p>"
    )


def _tiles(results: Sequence[Result]) -> str:
    """Return how many claims came out how, and how many numbers agree with what is expected."""
    claims = Counter(claim.verdict for result in results for claim in result.claims)
    lines = [line for result in results for line in result.headline]
    papers = Counter(line.verdict for line in lines if line.against == "paper")
    stated = Counter(line.verdict for line in lines if line.against == "abstract")
    apart = ("paper", "fitted", "abstract", "")
    others = Counter(line.verdict for line in lines if line.against not in apart)
    told = {"met": "claims are met", "missed": "claims are missed", "open": "claims are open"}
    made = [(each, str(claims[each]), told[each]) for each in get_args(ClaimVerdict)]
    sources = (
        ("paper", papers, "numbers match the papers"),
        ("abstract", stated, "cells agree with an abstract's factor or order"),
        ("other", others, "numbers match another source"),
    )
    for kind, counts, label in sources:
        if counts:
            made.append((kind, f"{counts['matches']} of {counts.total()}", label))
    return "\n".join(
        f'<div class="tile {kind}"><span class="count" data-count="{kind}">{number}</span> '
        f"<span>{label}</span></div>"
        for kind, number, label in made
        if claims or kind in ("paper", "abstract", "other")
    )


def _overview(arranged: Arranged, anchors: Mapping[int, str]) -> str:
    """Return the claim and the verdict of every study, group by group."""
    made = []
    for group, results in arranged:
        items = "".join(_overview_line(result, anchors[id(result)]) for result in results)
        chips = tables.claim_chips([claim for result in results for claim in result.claims])
        made.append(
            f'<h3><a href="#group-{group.name}">{text(group.title)}</a> {chips}</h3>\n'
            f'<ul class="overview">{items}</ul>'
        )
    return "\n".join(made)


def _overview_line(result: Result, anchor: str) -> str:
    return (
        f'<li><div><a href="#{anchor}">{text(result.manifest["title"])}</a> {small_badge(result)}'
        f'<span class="quiet"><code>{text(result.name)}</code></span></div>'
        f'<div class="result">{verdict(result)}</div>'
        f'<p class="quiet">{text(result.manifest["claim"])}</p></li>'
    )


# The studies.


def _groups(
    arranged: Arranged,
    anchors: Mapping[int, str],
    pictures: Mapping[Path, Picture],
    *,
    single: bool,
) -> str:
    made, first = [], True
    for group, results in arranged:
        articles = []
        for result in results:
            anchor, level = anchors[id(result)], 2 if single else 3
            articles.append(
                study_section.section(
                    result, anchor, pictures, level=level, first=first, claims=not single
                )
            )
            first = False
        inside = "\n".join(articles)
        made.append(
            inside
            if single
            else f'<section class="group" id="group-{group.name}" '
            f'aria-labelledby="group-{group.name}-title">\n'
            f'<h2 id="group-{group.name}-title">{text(group.title)}</h2>\n'
            f"{inside}\n</section>"
        )
    return "\n".join(made)


# The data of the frontier's controls.


def _frontier(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Return one choice per study, task and target, with its series; JSON has no NaN."""
    choices: dict[tuple[int, str, str], dict[str, Any]] = {}
    for place, result in enumerate(results):
        for point in result.frontier:
            about = {"task": point.task, "target": point.target, "study": result.manifest["study"]}
            choice = choices.setdefault(
                (place, point.task, point.target),
                about | {"small": result.small, "points": []},
            )
            values = point._asdict().items()
            lost = {k: None for k, v in values if isinstance(v, float) and not math.isfinite(v)}
            choice["points"].append(point._asdict() | lost)
    return list(choices.values())


def _embedded(value: Any) -> str:
    """Return JSON that cannot end the script element it stands in."""
    made = json.dumps(value, allow_nan=False)
    for sign in "<>&":
        made = made.replace(sign, f"\\u{ord(sign):04x}")
    return made
