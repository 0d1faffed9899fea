"""Corrections for stale, mismatched and broken actors of language models."""

from kondo_lab.evidence.study import Study
from kondo_lab.studies.lm_frictions.analysis import analyse
from kondo_lab.studies.lm_frictions.run import parts
from kondo_lab.studies.lm_frictions.settings import settings

STUDY = Study(
    name="lm-frictions",
    title="Language-model RL: corrections for stale, broken and corrupt data",
    paper="beyond the papers",
    claim=(
        "With 25 million parameters and stale, mismatched and broken actors and corrupt rewards "
        "together, a rule without behaviour probabilities ends at a held-out reward within 0.02 of "
        "PPO's with correct ones, and ahead of PPO's with wrong ones. Under each friction DG's "
        "error is about a tenth of the uncorrected baseline's, and its gain grows with the "
        "friction's strength."
    ),
    differences=(
        "The paper's experiments are on token reversal with about 50 thousand parameters; here "
        "models of 25 and 85 million learn sorting, addition and multiplication from supervised "
        "starts.",
        "Strengths of the frictions are ours: the paper's are not known.",
        "Staleness is a refresh of the actors' weights every so many steps, a lag, or real "
        "asynchrony with a queue; the author's code has a delay, fixed or uniform.",
        "The uncorrected baseline is GRPO's policy gradient: advantages divided by the group's "
        "standard deviation, no ratios. Rules with delight have centred advantages.",
        "Learning rates are chosen on a seed that is not reported, by the mean of the rewards "
        "without friction and with all frictions. They hold for all frictions, tasks, sizes and "
        "starts.",
        "Gates use the learner's own log-probs, from a forward without a graph.",
        "GSPO clips at 0.05 instead of the published 3e-4, which is for answers of thousands of "
        "tokens; CISPO caps ratios at 5 and has no lower bound.",
        "No KL penalty, no entropy bonus, no learning-rate schedule; Adam, gradient norm at most "
        "1.",
    ),
    version=1,
    settings=settings,
    parts=parts,
    analyse=analyse,
)
