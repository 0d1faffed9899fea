"""Which rows are worth a backward pass of a language model, and does skipping pay by the clock?"""

from kondo_lab.evidence.study import Study
from kondo_lab.studies.lm_rl.analysis import analyse
from kondo_lab.studies.lm_rl.run import parts
from kondo_lab.studies.lm_rl.settings import settings

STUDY = Study(
    name="lm-rl",
    title="Language-model RL: which rows to keep, and how many rollouts a step",
    paper="beyond the papers",
    claim=(
        "With 302 million parameters an unbiased gate reaches a held-out sampled reward of 92% at "
        "least 5 times sooner in learner seconds and 2.5 times sooner in loop seconds than the "
        "best dense number of rollouts per step; and delight selects better rows than other "
        "signals at an equal loss."
    ),
    differences=(
        "Transformers of 25 to 302 million parameters, trained from random weights on synthetic "
        "text. A supervised start ends where 30% of sampled answers are right (5% and 1% for rare "
        "starts). A model of a billion parameters is timed without learning.",
        "One update per batch of rollouts: sampler and learner have the same policy up to "
        "rounding, so PPO's clip has no effect.",
        "Selections keep 10% of the rows or tokens and divide by all tokens. PODS in the "
        "comparison by time divides by what it keeps, as published, and treats the whole batch as "
        "one group.",
        "Learning rates, and the best number of rollouts and rate, are chosen at each size on a "
        "seed that is not reported: by loop seconds to the target.",
        "Dense points also differentiate rows of advantage 0 (about 58% of the rows at 302 million "
        "parameters). A filter that leaves them out has the same gradient and was not run; in "
        "version 1 its learner was 1.05 times (25 million) and 1.32 ± 0.06 times (85 million) as "
        "fast to 90% of the way.",
        "A timed run ends where the mean of two successive evaluations reaches the target.",
        "No KL penalty, no entropy bonus, no learning-rate schedule; Adam, gradient norm at most "
        "1.",
    ),
    version=2,
    settings=settings,
    parts=parts,
    analyse=analyse,
)
