"""Does skipping pay by the clock, at equal quality, in reinforcement of language models?"""

from kondo_lab.studies.lm_rl.analysis import analyse
from kondo_lab.studies.lm_rl.run import parts
from kondo_lab.studies.lm_rl.settings import settings
from kondo_lab.studies.study import Study

STUDY = Study(
    name="lm-rl",
    title="Language-model RL: reward by the clock",
    paper="beyond the papers",
    claim=(
        "With the sampler's log-probs as the screen, DG-K reaches a held-out reward in a fifth of "
        "dense GRPO's learner seconds, and 1.5 times sooner than the best alternative at an equal "
        "rate, with a final reward not worse by more than one standard error."
    ),
    differences=(
        "Transformers of 5 to 300 million parameters, trained from nothing on synthetic text; a "
        "supervised start ends where 30% of sampled answers are right.",
        "One update per batch of rollouts: the policy that samples is the policy that learns, up "
        "to rounding, and PPO's clip never bites.",
        "PODS is read for a whole batch, since 3% of a group of 8 is less than one answer: of all "
        "rows those whose rewards, less their group's mean, vary most.",
        "Every loss is a sum over tokens divided by the tokens of the batch, but PODS's, which is "
        "divided by those kept.",
        "Learning rates are chosen on seeds that are not reported, by a rule fixed beforehand; the "
        "two largest models take those of 25 million parameters.",
        "In populations learner seconds are steps times the seconds of a step measured alone; only "
        "the larger models are trained by the clock.",
        "No KL penalty, no entropy bonus, no learning-rate schedule; Adam, gradient norm at most "
        "1.",
    ),
    version=1,
    settings=settings,
    parts=parts,
    analyse=analyse,
)
