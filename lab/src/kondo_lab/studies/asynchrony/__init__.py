"""Real asynchrony on Ray beside the delays that the other studies simulate."""

from kondo_lab.evidence.study import Study
from kondo_lab.studies.asynchrony.analysis import analyse
from kondo_lab.studies.asynchrony.run import parts
from kondo_lab.studies.asynchrony.settings import settings

STUDY = Study(
    name="asynchrony",
    title="Real and simulated staleness",
    paper="Distributed paper, staleness; beyond it: real actors",
    claim=(
        "Weight age explains the effect of asynchrony: one process that replays the recorded ages "
        "of the weights ends with the same error as real actors. Question: does a simulated delay "
        "of the same mean age, fixed or uniform, do so too?"
    ),
    differences=(
        "The paper simulates staleness, as mnist-stale does. Here actors on Ray are late because "
        "they are busy or slow, or because weights are published rarely. Digits instead of MNIST, "
        "100 images a step.",
        "On Ray and replayed, the actor computes the baseline and the gate's delight with its old "
        "weights. In simulated delays the learner computes them with its current weights. DG's "
        "soft gate and importance weights always use the learner's current weights.",
        "On Ray and replayed, DG-K's price comes from earlier rollouts and is as old as the "
        "weights. In simulated delays DG-K keeps the best rows of each batch.",
        "The age of the weights depends on the machine and its load.",
    ),
    version=1,
    settings=settings,
    parts=parts,
    analyse=analyse,
)
