"""Figures 8 and 9 of the DG paper: token reversal by length and vocabulary."""

from kondo_lab.evidence.study import Study
from kondo_lab.studies.reversal_dg.analysis import analyse
from kondo_lab.studies.reversal_dg.run import parts
from kondo_lab.studies.reversal_dg.settings import settings

STUDY = Study(
    name="reversal-dg",
    title="DG on token reversal, by length and vocabulary",
    paper="DG paper, Figures 8 and 9, appendix D",
    claim=(
        "With a reward per token, DG learns reversal faster than REINFORCE, PPO and PMPO, and its "
        "error grows more slowly with the length and with the vocabulary. The same holds when the "
        "prompt is copied, when each token is changed, and when the correct prefix is rewarded."
    ),
    differences=(
        "Figure 9 has up to 10 seeds a point where the paper has 30, two lengths and four "
        "vocabularies. The variants of the appendix have 5 seeds and 2,000 steps, our choice.",
        "The paper does not state learning rate and feed-forward width. They come from "
        "reversal-fit, which is fitted to Figures 8 and 9 among others, so their numbers "
        "are marked fitted and do not count as the paper's; the orders of methods do. 2 layers "
        "and 2 heads.",
        "PPO has no KL term, so on its own samples it equals PG, as in the paper. Figure 9 uses "
        "PG's runs for it; these lines have no verdict.",
        "PMPO's alpha = 0.6, beta = 0.1 and PPO's clip 0.1 are those of the paper's Figure 13; how "
        "they were tuned is not known. PMPO has plain float32 advantages, as in the author's code, "
        "summed in order; the paper's order of summation is not known. PMPO with exact ties is a "
        "separate series.",
        "Products on the GPU are TF32, or float16 in fused kernels: 10 bits of mantissa.",
    ),
    version=2,
    settings=settings,
    parts=parts,
    analyse=analyse,
)
