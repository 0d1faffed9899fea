"""Propositions 1 and 2 of the Kondo paper: what a gate at price zero keeps of the gradient."""

from kondo_lab.evidence.study import Study
from kondo_lab.studies.bandit_kondo.analysis import analyse
from kondo_lab.studies.bandit_kondo.run import parts
from kondo_lab.studies.bandit_kondo.settings import settings

STUDY = Study(
    name="bandit-kondo",
    title="What the gate keeps of a bandit's gradient",
    paper="Kondo paper, Propositions 1 and 2, equation 1",
    claim=(
        "A gate at price 0 keeps only successes: the gradient keeps its direction, its "
        "perpendicular variance is 0, and a batch costs pB backward passes instead of B. An "
        "additive signal ranks a failure above a success unless alpha > L / (1 + L), which no "
        "fixed alpha satisfies. The weight sigmoid((delight - price) / temperature) maximises "
        "delight minus price plus entropy."
    ),
    differences=(
        "The paper's number is the proposition's formula at the stated p and K; three values of "
        "alpha* are quoted from it.",
        "The baseline is 0.5 unless stated. The paper's baseline for Proposition 1 is not known. "
        "At b = 0 a failure has no gradient, and PG equals the gate.",
        "The gate's problem (equation 1) and its limits are checked by enumeration and by draws "
        "of kondo.Gate. The statements of the paper's Lemma 1 and Remark 1 are not known.",
        "kondo.Gate never keeps a sample of delight exactly 0; the sigmoid would keep half.",
    ),
    version=1,
    settings=settings,
    parts=parts,
    analyse=analyse,
)
