"""Figures 8 and 10 of the Kondo paper: the gate on token reversal."""

from kondo_lab.evidence.study import Study
from kondo_lab.studies.reversal_kondo.analysis import analyse
from kondo_lab.studies.reversal_kondo.run import parts
from kondo_lab.studies.reversal_kondo.settings import settings

STUDY = Study(
    name="reversal-kondo",
    title="The Kondo gate on token reversal",
    paper="Kondo paper, Figures 8 and 10, section 5",
    claim=(
        "Gating whole sequences, DG-K learns about as fast as DG with 3% to 7% of the backward "
        "passes and solves longer sequences than PG, PPO and PMPO; its gain grows with difficulty."
    ),
    differences=(
        "The gate chooses whole sequences: choosing tokens does not reproduce the figure.",
        "Ties are kept, as in the author's code; the gate with an exact count is a separate "
        "series. Zero-advantage sequences count in the quantile and are not differentiated.",
        "The paper does not state learning rate and feed-forward width. They come from "
        "reversal-fit, which is fitted to Figures 8 and 10 among others, so their numbers "
        "are marked fitted and do not count as the paper's; the orders of methods do. 2 layers "
        "and 2 heads.",
        "Figure 10 tries every sixth length and interpolates to where the reward is 0.75; the "
        "paper's lengths are not known. A length is solved by the reward at the moment or by the "
        "mean reward since the start. Both are shown, and the one that reversal-fit chooses is "
        "judged.",
        "PPO has no KL term, so on its own samples it equals PG, as in the paper. Figure 10 uses "
        "PG's runs for it; these lines have no verdict.",
        "PMPO's alpha = 0.6, beta = 0.1 and PPO's clip 0.1 are those of the DG paper's Figure 13. "
        "PMPO has plain float32 advantages, as in the author's code, summed in order; the papers' "
        "order of summation is not known. PMPO with exact ties is a separate series.",
        "Products on the GPU are TF32, or float16 in fused kernels: 10 bits of mantissa.",
    ),
    version=2,
    settings=settings,
    parts=parts,
    analyse=analyse,
)
