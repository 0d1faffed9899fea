"""Gates on control tasks, where one reward is shared by many decisions."""

from kondo_lab.evidence.study import Study
from kondo_lab.studies.control.analysis import analyse
from kondo_lab.studies.control.run import parts
from kondo_lab.studies.control.settings import settings

STUDY = Study(
    name="control",
    title="Gates on control tasks",
    paper="beyond the papers",
    claim=(
        "Where many decisions share one reward, gates that keep the highest delight end below "
        "dense. Gates whose expected gradient is the dense one, unbiased 10% and noise 1.5, end "
        "within one standard error of dense."
    ),
    differences=(
        "The papers have no control tasks. CartPole-v1 and Acrobot-v1 are trained by REINFORCE "
        "with a value baseline, Pendulum-v1, which has continuous actions, by PPO.",
        "All contenders have the same hyperparameters. Learning rates were chosen for dense alone, "
        "among three, on three other seeds.",
        "The gate skips rows of the policy's update. The value function is trained on all rows, "
        "and its rows are not counted.",
        "Advantages are centred over the batch and not divided by their standard deviation.",
    ),
    version=1,
    settings=settings,
    parts=parts,
    analyse=analyse,
    cpu_only=True,
)
