"""PG, DG and DG-K on two tasks that need no download: the study behind `kondo demo`."""

from kondo_lab.evidence.study import Study
from kondo_lab.studies.demo.analysis import analyse
from kondo_lab.studies.demo.run import parts
from kondo_lab.studies.demo.settings import settings

STUDY = Study(
    name="demo",
    title="PG, DG and the Kondo gate side by side",
    paper="beyond the papers; their methods on two small tasks",
    claim=(
        "Delight is advantage times surprisal. PG differentiates every sample. DG weights every "
        "sample by the sigmoid of its delight. DG-K trains on the 3% of samples with the highest "
        "delight, as PG would, and skips the backward pass of all others. It ends below PG's error "
        "after as many samples, and its learner takes less time."
    ),
    differences=(
        "Online error is 1 - mean reward of the sampled actions, over 5% of the run. Test error is "
        "that of the most likely action on the 20% of images held out; reversal has none, since "
        "every prompt is new. Counts and seconds are of one seed's run, averaged over seeds.",
        "Learner seconds are gate + forward + backward. The gate computes delight, chooses units "
        "and gathers their rows. Dense methods pay forward and backward only. Sampling and Adam "
        "are the same work for every method, so only the loop's speed-up includes them.",
        "Two small models run on a CPU, one thread each. The speed-ups are those of this machine "
        "in this run. The fixed cost of choosing units matters more here than on a large model.",
        "The screen is free: the sampler already computed the log-probs of the current weights, so "
        "delight is exact without a screening forward. Off-policy training would need one.",
        "Training is far shorter than in the papers, which give each method a million samples, so "
        "late differences do not show. Digits are 8 x 8 images from scikit-learn, not MNIST, with "
        "a larger batch and a wider network. Reversal has the papers' task, model and batch, and "
        "twice their learning rate.",
        "A standard error over few seeds is itself uncertain. On reversal, runs differ a lot from "
        "seed to seed.",
    ),
    version=2,
    settings=settings,
    parts=parts,
    analyse=analyse,
    cpu_only=True,
)
