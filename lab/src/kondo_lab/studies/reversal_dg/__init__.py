"""Figures 8 and 9 of the DG paper: token reversal by length and vocabulary."""

from kondo_lab.studies.reversal_dg.analysis import analyse
from kondo_lab.studies.reversal_dg.run import parts
from kondo_lab.studies.reversal_dg.settings import settings
from kondo_lab.studies.study import Study

STUDY = Study(
    name="reversal-dg",
    title="DG on token reversal, by length and vocabulary",
    paper="DG paper, Figures 8 and 9",
    claim=(
        "Paid by the token, DG learns reversal faster than REINFORCE, PPO and PMPO, and its error "
        "grows more slowly with the length and with the vocabulary."
    ),
    differences=(
        "Figure 9 has 2 seeds a point where the paper has 30, two lengths and four vocabularies.",
        "Adam 1e-4, 2 layers, 2 heads, feed-forward 256: inferred from fits, not stated. Figure 9 "
        "is run with 3e-5 as well, which one seed at M = 50 had shown to be nearer the paper.",
        "PMPO's alpha = 0.6, beta = 0.1 and PPO's clip 0.1, beta = 0.1 as in the paper's Figure "
        "13; how they were tuned is not known.",
        "float32 products on the GPU are TF32.",
    ),
    version=1,
    settings=settings,
    parts=parts,
    analyse=analyse,
)
