"""Figures 2, 3 and 4 of the DG paper: baselines, samples per image, and gradient directions.

And the sweeps of its appendix.
"""

from kondo_lab.evidence.study import Study
from kondo_lab.studies.mnist_dg.analysis import analyse
from kondo_lab.studies.mnist_dg.run import parts
from kondo_lab.studies.mnist_dg.settings import settings

STUDY = Study(
    name="mnist-dg",
    title="DG on the MNIST bandit: baselines, samples and directions",
    paper="DG paper, Figures 2, 3 and 4, Appendix B",
    claim=(
        "DG ends below PG for every baseline and any number of samples per image, and its gradient "
        "is closer to the cross-entropy gradient than PG's."
    ),
    differences=(
        "30 seeds with one sample per image and 20 with more; the paper has 100.",
        "Weights have the lecun-normal initialisation and biases are 0, the default of JAX's "
        "libraries. The author's initialisation is not known.",
        "The error at a step is the mean over the last tenth of the steps so far, at most 100 "
        "steps; at the end over the last 200.",
        "Figure 4 has the expected baseline and the exact gradients of the same images, as a mean "
        "over 8 new batches. The paper does not state the baseline; its small gaps at S = 100 fit "
        "only this one.",
        "Appendix B: a third party says what was swept and that the gain persists; the numbers are "
        "not known. Our grids have 5 seeds, the expected baseline and 10,000 steps. Our widths end "
        "at 1024, the paper's at 2048.",
    ),
    version=2,
    settings=settings,
    parts=parts,
    analyse=analyse,
)
