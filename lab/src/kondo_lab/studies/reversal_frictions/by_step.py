"""The errors with all frictions during training: who is ahead depends on when one looks."""

import pandas as pd

from kondo_lab.evidence import statistics
from kondo_lab.evidence.study import Headline, headline
from kondo_lab.studies.reversal_frictions.run import ALL, TOGETHER, methods, of
from kondo_lab.studies.reversal_frictions.settings import Settings
from kondo_lab.training.learner_error import LEARNER_ERROR

SHARES = (0.2, 0.4, 0.6, 1.0)
"""Of the steps, after which the errors are told."""


def metric(settings: Settings, reward: str) -> str:
    """Return what the error at a step is called."""
    return f"{LEARNER_ERROR} at a step, {reward}, {ALL}, H = {settings.length}"


def lines(records: pd.DataFrame, settings: Settings, reward: str, figure: str) -> list[Headline]:
    """Return the error of every method at the looks nearest to `SHARES`. x: the step."""
    part, length = of(TOGETHER, reward), float(settings.length)
    seen = statistics.select(records, part, "DG", LEARNER_ERROR, setting=length)["step"].unique()
    wanted = [share * settings.num_steps for share in SHARES]
    looks = sorted({int(min(seen, key=lambda step: abs(step - each))) for each in wanted})
    return [
        headline(
            figure,
            name,
            metric(settings, reward),
            step,
            statistics.at(records, part, name, LEARNER_ERROR, step, setting=length),
        )
        for step in looks
        for name in methods(settings)
    ]
