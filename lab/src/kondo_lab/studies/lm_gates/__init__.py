"""Which gate is safe for language models: does it end where dense training ends?"""

from kondo_lab.evidence.study import Study
from kondo_lab.studies.lm_gates.analysis import analyse
from kondo_lab.studies.lm_gates.run import parts
from kondo_lab.studies.lm_gates.settings import settings

STUDY = Study(
    name="lm-gates",
    title="Language-model RL: reward of gated and dense training",
    paper="beyond the papers",
    claim=(
        "With 25 million parameters, on sorting and on addition, kondo.UnbiasedGate at 10% of the "
        "rows and at noise 1.5 ends at a held-out reward lower than dense GRPO's by at most one "
        "standard error of the difference."
    ),
    differences=(
        "Tasks, starts, losses and the loop are those of lm-rl.",
        "Unbiased gates have dense GRPO's loss, full denominator and learning rate. None is tuned.",
        "Learning rates on sorting are those of results/lm-rl-v1; on addition dense GRPO, DG-K, "
        "PODS and random rows are tuned here, on a seed that is not reported.",
        "Rows are drawn by centred advantages, and the loss divides advantages by the group's "
        "standard deviation, so values are not exactly proportional to gradient norms.",
        "Gradient norms are clipped at 1 and Adam divides by a running norm, so an unbiased "
        "gradient does not give an exactly unbiased update.",
        "Dense GRPO is plain PyTorch. Gates use kondo.backward.",
    ),
    version=1,
    settings=settings,
    parts=parts,
    analyse=analyse,
)
