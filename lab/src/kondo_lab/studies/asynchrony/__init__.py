"""Real asynchrony on Ray beside the delays that the other studies simulate."""

from kondo_lab.studies.asynchrony.analysis import analyse
from kondo_lab.studies.asynchrony.run import parts
from kondo_lab.studies.asynchrony.settings import settings
from kondo_lab.studies.study import Study

STUDY = Study(
    name="asynchrony",
    title="Real and simulated staleness",
    paper="Distributed paper, staleness; beyond it: real actors",
    claim=(
        "Weight age explains the effect of asynchrony: one process that replays the ages of real "
        "actors' weights ends with the same error. Question: does a simulated delay of the same "
        "mean age, fixed or uniform, do so too?"
    ),
    differences=(
        "The paper's staleness is simulated, like that of mnist-stale; here actors on Ray are late "
        "because they are busy, slow, or seldom given new weights. Digits instead of MNIST, 100 "
        "images a step.",
        "On Ray and replayed, baseline and the gate's delight are the actor's, by its old weights; "
        "the laboratory's delays leave them to the learner of now. DG's soft gate and importance "
        "weights ask the learner of now everywhere.",
        "On Ray and replayed, DG-K's price comes from earlier rollouts and is as old as the "
        "weights; the laboratory's DG-K takes the best of each batch.",
        "How old the weights are depends on the machine and on what else it does.",
    ),
    version=1,
    settings=settings,
    parts=parts,
    analyse=analyse,
)
