"""Propositions 1 and 2 and Figures 5 and 6 of the DG paper: bandits and tables of bandits."""

from kondo_lab.studies.bandit_dg.analysis import analyse
from kondo_lab.studies.bandit_dg.run import parts
from kondo_lab.studies.bandit_dg.settings import settings
from kondo_lab.studies.study import Study

STUDY = Study(
    name="bandit-dg",
    title="Which way DG moves a bandit and a table of bandits",
    paper="DG paper, Propositions 1 and 2, Figures 5 and 6",
    claim=(
        "In one context DG keeps PG's direction in expectation and shrinks its cosine gap by "
        "(w- / c)^2. Over many contexts, with exact gradients, DG stands closer than PG to the "
        "cross-entropy gradient, for eta > 1/2."
    ),
    differences=(
        "Figures 5 and 6: set-up as re-run by others; the figures' numbers are not known to us, so "
        "only the order of the series is compared.",
        "The error is that of the policy before the step, the correct arm is arm 0.",
        "Figure 6 is run with 30 seeds; the paper's number is not known to us.",
    ),
    version=1,
    settings=settings,
    parts=parts,
    analyse=analyse,
)
