"""Token reversal with stale and buggy actors, corrupt rewards and rare discoveries."""

from kondo_lab.evidence.study import Study
from kondo_lab.studies.reversal_frictions.analysis import analyse
from kondo_lab.studies.reversal_frictions.run import parts
from kondo_lab.studies.reversal_frictions.settings import settings

STUDY = Study(
    name="reversal-frictions",
    title="Four frictions on token reversal",
    paper="Distributed paper, token reversal with four frictions",
    claim=(
        "Under stale actors, actor bugs, corrupt rewards or rare discoveries alone, DG ends with "
        "about a tenth of the error of PG, PPO and PMPO. With all four it needs a tenth of the "
        "samples, its advantage grows with the length, and it solves sequences 2 to 3 times as "
        "long."
    ),
    differences=(
        "The paper's strengths, seeds and lengths were not found. Ours: actors 0 to 30, 100 or 300 "
        "steps old, the age drawn at every step; bugs in 0.3% to 30% of the rows, corruption in "
        "3%, 10% and 30%, discoveries in 0.1%, 1% and 10%. Together: 100, 10%, 10% and 1%.",
        "A bug answers all zeros, a discovery is the correct answer, a corrupt reward is a fair "
        "coin in {0, 1}. Replaced rows report a behaviour probability of 1, as in the author's "
        "code. In the part own they report the acting policy's probability of their tokens.",
        "The error is the learner's: its own answers to new prompts, with the true reward.",
        "The paper's reward is not known. Both are run, the correct prefix and the share of "
        "correct tokens. 10,000 steps of 10 prompts x 10 answers, Adam 1e-4.",
        "PG has no correction. PG by token ratio, which weighs each token by pi / mu, is what the "
        "author's code calls PG.",
        "Compute is the number of samples until the learner's error first falls to 10% and to 25%. "
        "A run that never reaches it counts with all its samples, and its ratio is a bound.",
        "Importance weights are of whole answers, capped at 10 and not differentiated, as in the "
        "author's code. Products on the GPU are TF32, or float16 in fused kernels: 10 bits of "
        "mantissa.",
    ),
    version=2,
    settings=settings,
    parts=parts,
    analyse=analyse,
)
