"""The quality-cost frontier: every gate on one plot per task."""

from kondo_lab.evidence.study import Study
from kondo_lab.studies.frontier.analysis import analyse
from kondo_lab.studies.frontier.run import parts
from kondo_lab.studies.frontier.settings import settings

STUDY = Study(
    name="frontier",
    title="The quality-cost frontier of all gates",
    paper="beyond the papers",
    claim=(
        "Gates that rank by delight reach a given error with fewer backward passes than PG, DG "
        "and random rows. Which gate and rate is cheapest depends on the cost of a backward pass."
    ),
    differences=(
        "The learning rate is the papers' for every gate (Adam 1e-3 on MNIST, 1e-4 on reversal) "
        "and not tuned per rate, as the Kondo paper's Fig 2 does. A gate that needs another rate "
        "is shown worse than it could be.",
        "Token reversal stops at 3000 steps; the papers go to 10,000.",
        "A backward pass is a kept row whose signal is not zero. Costs are counted, not measured.",
    ),
    version=1,
    settings=settings,
    parts=parts,
    analyse=analyse,
)
