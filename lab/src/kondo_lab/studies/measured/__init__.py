"""The time that a gated step saves, in seconds instead of counted passes."""

from kondo_lab.evidence.study import Study
from kondo_lab.studies.measured.analysis import analyse
from kondo_lab.studies.measured.run import parts
from kondo_lab.studies.measured.settings import settings

STUDY = Study(
    name="measured",
    title="The gate's speed-up in seconds",
    paper="beyond the papers; beside Kondo Fig 3, which counts passes",
    claim=(
        "Counting passes, DG-K 3% is 1.41 (1 + c) / (1 + 0.03 c) times faster than PG to 5% test "
        "error. Measured in seconds, the gate saves time where a step is mostly computation, and "
        "not where it mostly launches small kernels."
    ),
    differences=(
        "The paper counts 1 for a forward and c for a backward and measures no time. Here c is "
        "the time of the backward over that of the forward, for each workload.",
        "Seeds are rounds: each times every method once, and a speed-up is a ratio inside a round. "
        "Numbers are medians over rounds, with a standard error of the median from p20 and p80.",
        "The paper's gate pays a forward for every sample. Our engine skips it where the sampler's "
        "log-probs are the screen (free), and pays one without a graph otherwise (exact); kept "
        "rows are then run forward again, with a graph.",
        "Pixels and labels are random and the policy is untrained: times do not depend on them.",
        "Steps to 5% test error are those of width 100 and batch 100, whatever is timed.",
        "Dense steps are plain PyTorch, so that only the gate pays for the engine's bookkeeping.",
        "float32 throughout, on CUDA without TF32.",
    ),
    version=1,
    settings=settings,
    parts=parts,
    analyse=analyse,
)
