"""Figures 2, 3 and 4 of the DG paper: baselines, samples per image, and gradient directions."""

from kondo_lab.studies.mnist_dg.analysis import analyse
from kondo_lab.studies.mnist_dg.run import parts
from kondo_lab.studies.mnist_dg.settings import settings
from kondo_lab.studies.study import Study

STUDY = Study(
    name="mnist-dg",
    title="DG on the MNIST bandit: baselines, samples and directions",
    paper="DG paper, Figures 2, 3 and 4",
    claim=(
        "DG ends below PG for every baseline and any number of samples per image, and its gradient "
        "is closer to the cross-entropy gradient than PG's."
    ),
    differences=(
        "30 seeds with one sample per image and 10 with more; the paper has 100.",
        "Figure 4 measures the expected baseline, with the exact gradients of the same batch of "
        "images; the paper does not say which, but its small gaps at S = 100 allow no other "
        "reading.",
    ),
    version=1,
    settings=settings,
    parts=parts,
    analyse=analyse,
)
