"""MNIST with actors that are some learner steps behind."""

from kondo_lab.evidence.study import Study
from kondo_lab.studies.mnist_stale.analysis import analyse
from kondo_lab.studies.mnist_stale.run import parts
from kondo_lab.studies.mnist_stale.settings import settings

STUDY = Study(
    name="mnist-stale",
    title="Stale actors on the MNIST bandit",
    paper="Distributed paper, MNIST with staleness",
    claim=(
        "Actors use parameters that are up to 1000 learner steps old. Without any correction DG "
        "ends at about a quarter of the error of PG with exact importance weights."
    ),
    differences=(
        "Network, optimiser, batch and baseline are those of the Kondo paper's MNIST bandit. The "
        "delays go up to 1000; the paper's own list and its numbers were not found: 2% for DG and "
        "8% for PG at 1000 are a third party's reading.",
        "Weights have the lecun-normal initialisation and biases are 0, the default of JAX's "
        "libraries.",
        "The error is the learner's, not the actors': 1 - pi(label) over 10,000 training images.",
        "The baseline sum_a pi(a)^2 and the surprisal are the current learner's. Importance "
        "weights and PPO's ratio are exact, relative to the actor.",
        "In the first steps, up to the delay, actors have the learner's first parameters.",
        "PPO has clip 0.1, no KL term and one epoch.",
    ),
    version=3,
    settings=settings,
    parts=parts,
    analyse=analyse,
)
