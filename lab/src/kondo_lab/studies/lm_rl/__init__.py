"""Which rows are worth a backward pass of a language model, and does skipping pay by the clock?"""

from kondo_lab.studies.lm_rl.analysis import analyse
from kondo_lab.studies.lm_rl.run import parts
from kondo_lab.studies.lm_rl.settings import settings
from kondo_lab.studies.study import Study

STUDY = Study(
    name="lm-rl",
    title="Language-model RL: selection, loss and the plane of rollouts and kept rows",
    paper="beyond the papers",
    claim=(
        "With 302 million parameters an unbiased gate reaches a held-out sampled reward of 92% at "
        "least 5 times sooner in learner seconds and 2.5 times sooner in loop seconds than the "
        "best dense number of rollouts per step; and delight selects better rows than other "
        "signals at an equal loss."
    ),
    differences=(
        "Transformers of 25 to 302 million parameters, trained from nothing on synthetic text; a "
        "supervised start ends where 30% of sampled answers are right, in two fields 5% and 1%. "
        "One of a billion parameters is timed without learning.",
        "One update per batch of rollouts: the policy that samples is the policy that learns, up "
        "to rounding, and PPO's clip never bites.",
        "Selections keep 10% of the rows, or tokens, and all have the full denominator; PODS on "
        "the plane is divided by what it keeps, as published, and reads the whole batch as one "
        "group.",
        "Learning rates are chosen on a seed that is not reported, at each size, and so is the "
        "best point of a plane: by loop seconds to the target.",
        "A run by the clock ends where the mean of two successive evaluations is at the target.",
        "No KL penalty, no entropy bonus, no learning-rate schedule; Adam, gradient norm at most "
        "1.",
    ),
    version=2,
    settings=settings,
    parts=parts,
    analyse=analyse,
)
