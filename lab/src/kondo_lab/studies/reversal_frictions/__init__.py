"""Token reversal with stale and buggy actors, corrupt rewards and rare discoveries."""

from kondo_lab.studies.reversal_frictions.analysis import analyse
from kondo_lab.studies.reversal_frictions.run import parts
from kondo_lab.studies.reversal_frictions.settings import settings
from kondo_lab.studies.study import Study

STUDY = Study(
    name="reversal-frictions",
    title="Four frictions on token reversal",
    paper="Distributed paper, token reversal with four frictions",
    claim=(
        "Stale actors, actor bugs, corrupt rewards and rare discoveries, one by one and together: "
        "DG ends with about a tenth of the error of PG, PPO and PMPO, and with all four it solves "
        "sequences 2 to 3 times as long."
    ),
    differences=(
        "The paper's strengths, seeds and lengths were not found. Ours: actors 0 to 30, 100 or 300 "
        "steps old, the age drawn at every step; bugs and corruption in 3%, 10% and 30% of the "
        "rows; discoveries in 0.1%, 1% and 10%. Together: the second of each.",
        "A bug answers all zeros, a discovery is the right answer, a corrupt reward is a fair coin "
        "in {0, 1}; replaced rows report a behaviour probability of 1, as in the author's code.",
        "The error is the learner's: its own answers to fresh prompts, paid by the true reward.",
        "The reward is the correct prefix, as in the Kondo paper; which one this paper uses is not "
        "known. 4,000 steps of 10 prompts x 10 answers, Adam 1e-4.",
        "PG corrects nothing. The author's PG weighs each token by pi / mu of that token: it is "
        "the series PG by token ratio of the part together.",
        "Importance weights are of whole answers, capped at 10 and not differentiated, as in the "
        "author's code. float32 products on the GPU are TF32.",
    ),
    version=1,
    settings=settings,
    parts=parts,
    analyse=analyse,
)
