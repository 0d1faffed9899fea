"""Figures 8 and 10 of the Kondo paper: the gate on token reversal."""

from kondo_lab.studies.reversal_kondo.analysis import analyse
from kondo_lab.studies.reversal_kondo.run import parts
from kondo_lab.studies.reversal_kondo.settings import settings
from kondo_lab.studies.study import Study

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
        "Ties are kept, as in the author's code; the gate with an exact count is a series of its "
        "own. Zero-advantage sequences take places in the quantile and are not paid for.",
        "Adam 1e-4, 2 layers, 2 heads, feed-forward 256: inferred from fits, not stated.",
        "Figure 10 tries every third length with 3 seeds and interpolates to where the reward is "
        "0.75; the paper's lengths and seeds are not known. A length counts as solved by the mean "
        "reward since the start of training: read so, the paper's numbers come out; by the reward "
        "at the moment, every method solves longer sequences sooner. A lower learning rate, 3e-5, "
        "is shown beside it.",
        "PMPO's alpha = 0.6, beta = 0.1 and PPO's clip 0.1, beta = 0.1 are the values of the DG "
        "paper's Figure 13; a grid of PMPO's, and other learning rates of the gate, are shown.",
        "float32 products on the GPU are TF32.",
    ),
    version=1,
    settings=settings,
    parts=parts,
    analyse=analyse,
)
