"""Proposition 3 of the Kondo paper: gates by delight prefer arms with noisy rewards."""

from kondo_lab.evidence.study import Study
from kondo_lab.studies.gambling.analysis import analyse
from kondo_lab.studies.gambling.run import parts
from kondo_lab.studies.gambling.settings import settings

STUDY = Study(
    name="gambling",
    title="Gates by delight prefer lucky actions",
    paper="Kondo paper, Proposition 3 and section 4.2",
    claim=(
        "An arm that is worse by Delta on average, with noise sigma, has a positive advantage "
        "with probability Phi(-p Delta / sigma): almost never for sigma << Delta, half the time "
        "for sigma >> Delta. DG and the gate then learn to prefer it. With equal noise on all arms "
        "DG and PG degrade together."
    ),
    differences=(
        "The paper's parameters and numbers are not known to us; ours: Delta = 0.5, two arms, "
        "batches of 100, Adam at 0.02 for 1000 steps from even odds.",
        "The baseline is the policy's true expected reward, as in the closed form. It is not "
        "learned.",
        "Learning rate and steps were chosen so that PG without noise plays the bad arm less than "
        "1% of the time. The part `optimisers` shows other learning rates and SGD.",
    ),
    version=1,
    settings=settings,
    parts=parts,
    analyse=analyse,
)
