"""Measured beside counted: speed-ups per step, and to a quality, against the paper's curve."""

from collections.abc import Sequence

import pandas as pd

from kondo_lab.evidence.captions import with_captions
from kondo_lab.evidence.study import Analysis, Estimate, Headline, headline
from kondo_lab.studies.measured import drawing, run
from kondo_lab.studies.measured.captions import captions
from kondo_lab.studies.measured.claims import claims
from kondo_lab.studies.measured.quality import TARGET, StepGain, step_gain
from kondo_lab.studies.measured.run import EXACT, FREE, LEARNER, LOOP, PG
from kondo_lab.studies.measured.settings import BanditShape, Settings, Shape
from kondo_lab.studies.measured.timings import spread

BEYOND, FIG_3 = "beyond the paper", "Kondo Fig 3, counted"


def analyse(records: pd.DataFrame, settings: Settings) -> Analysis:
    """Return the study's numbers and figures."""
    timed = set(records[records["metric"] == LEARNER]["part"])
    shapes = [shape for shape in settings.shapes if shape.name in timed]
    if not shapes:
        return Analysis(headline=[], figures={}, findings=_left_out(records))
    gain = step_gain()
    bandits = [shape for shape in shapes if isinstance(shape, BanditShape)]
    figures = {"speed-up-per-step": drawing.per_step(records, shapes)}
    if bandits:
        figures["speed-up-to-quality"] = drawing.to_quality(records, bandits, gain)
    lines = [line for shape in shapes for line in _lines(records, shape, gain)]
    found = Analysis(
        headline=lines,
        claims=claims(lines),
        figures=figures,
        findings=[*_findings(records, shapes, gain), *_left_out(records)],
    )
    return with_captions(found, captions(lines, found.claims))


def _lines(records: pd.DataFrame, shape: Shape, gain: StepGain) -> list[Headline]:
    def line(
        series: str,
        metric: str,
        *,
        suffix: str = "",
        steps: float = 1.0,
        counted: float | None = None,
    ) -> Headline:
        found = spread(records, shape, series, metric).times(steps)
        figure = BEYOND if counted is None else FIG_3
        ours = Estimate(found.p50, found.se, found.rounds)
        # The paper counts passes and says nothing of seconds: its formula at our c is no claim of
        # its own about this clock.
        at = (figure, series, metric + suffix, shape.name)
        return headline(*at, ours, expected=counted, against="formula")

    lines = [line(PG, run.COST_RATIO), line(PG, "seconds learner")]
    lines += [line(series, metric) for metric in (LEARNER, LOOP) for series in (FREE, EXACT)]
    if isinstance(shape, BanditShape):
        # With the same gain in steps on both sides, clock and count alone are compared.
        counted = gain.counted(lines[0].ours)
        for metric, by_count in ((LEARNER, counted), (LOOP, {})):
            lines += [
                line(
                    s, metric, suffix=f" over PG to {TARGET}", steps=steps, counted=by_count.get(s)
                )
                for s, steps in gain.by_series.items()
            ]
    return lines


def _findings(records: pd.DataFrame, shapes: Sequence[Shape], gain: StepGain) -> list[str]:
    ratios = {shape.name: spread(records, shape, PG, run.COST_RATIO).p50 for shape in shapes}
    least, most = min(ratios, key=ratios.__getitem__), max(ratios, key=ratios.__getitem__)
    return [
        f"A backward costs {ratios[least]:.2f} ({least}) to {ratios[most]:.2f} ({most}) forwards, "
        f"by the clock.",
        *(
            _where_it_pays(records, shapes, series, metric, what)
            for metric, what in ((LEARNER, "learner"), (LOOP, "whole loop"))
            for series in (FREE, EXACT)
        ),
        f"Speed-ups to {TARGET} are those of a step times {gain.gate:.3g} (DG-K) and "
        f"{gain.dg:.3g} (DG), PG's steps over the method's, from {gain.source}.",
    ]


def _where_it_pays(
    records: pd.DataFrame, shapes: Sequence[Shape], series: str, metric: str, what: str
) -> str:
    """Name the workloads where a step takes longer than PG's, and the one that gains most."""
    found = {shape.name: spread(records, shape, series, metric).p50 for shape in shapes}
    slower = [f"{name} ({ratio:.2f}x)" for name, ratio in found.items() if ratio < 1]
    best = max(shapes, key=lambda shape: found[shape.name])
    says = f"{series}, {what}: at best {found[best.name]:.2f}x ({best.name}"
    if metric == LEARNER:
        says += f"; counted {spread(records, best, series, run.COUNTED).p50:.2f}x"
    if not slower:
        return f"{says}); no workload is slower than PG."
    return f"{says}). It does not pay on {len(slower)} of {len(shapes)}: {', '.join(slower)}."


def _left_out(records: pd.DataFrame) -> list[str]:
    names = records[records["metric"] == run.LEFT_OUT]["part"].tolist()
    return [f"Too large for this device, not timed: {', '.join(names)}."] if names else []
