"""Propositions 1 and 2 of the Kondo paper: what a gate at price zero keeps of the gradient."""

from kondo_lab.studies.bandit_kondo.analysis import analyse
from kondo_lab.studies.bandit_kondo.run import parts
from kondo_lab.studies.bandit_kondo.settings import settings
from kondo_lab.studies.study import Study

STUDY = Study(
    name="bandit-kondo",
    title="What the gate keeps of a bandit's gradient",
    paper="Kondo paper, Propositions 1 and 2, equation 1",
    claim=(
        "A gate at price 0 keeps the successes alone: the direction of the gradient stays, its "
        "perpendicular variance is 0, and pB backward passes are paid instead of B. An additive "
        "priority ranks a failure above a success unless alpha > L / (1 + L), which no fixed alpha "
        "satisfies. The weight sigmoid((chi - price) / eta) maximises value less price "
        "plus entropy."
    ),
    differences=(
        "The paper's number is the proposition's formula at the stated p and K; three values of "
        "alpha* are quoted from it.",
        "Baseline b = 0.5 unless said otherwise: at b = 0 a failure has no gradient and PG is the "
        "gate; the paper's baseline for Proposition 1 is not known to us.",
        "The gate's problem (equation 1) and its limits are checked by enumeration and by what "
        "kondo.Gate draws. The statements of the paper's Lemma 1 and Remark 1 are not known to us.",
        "A sample of delight exactly 0 is never kept by our gate; the sigmoid would keep half.",
    ),
    version=1,
    settings=settings,
    parts=parts,
    analyse=analyse,
)
