"""Propositions 1 and 2 and Figures 5 and 6 of the DG paper: bandits and tables of bandits."""

from kondo_lab.evidence.study import Study
from kondo_lab.studies.bandit_dg.analysis import analyse
from kondo_lab.studies.bandit_dg.run import parts
from kondo_lab.studies.bandit_dg.settings import settings

STUDY = Study(
    name="bandit-dg",
    title="The direction of DG's gradient on bandits",
    paper="DG paper, Propositions 1 and 2, Figures 5 and 6",
    claim=(
        "With one context DG keeps PG's expected direction and shrinks its cosine gap by "
        "(w- / c)^2. With many contexts and exact gradients, DG is closer than PG to the "
        "cross-entropy gradient for temperatures above 1/2."
    ),
    differences=(
        "Figures 5 and 6 follow a third party's set-up. Their numbers are not known, so only the "
        "order of the series is compared.",
        "The error is that of the policy before the step. The correct arm is arm 0.",
        "Figure 6 has 30 seeds; the paper's number of seeds is not known.",
    ),
    version=1,
    settings=settings,
    parts=parts,
    analyse=analyse,
)
