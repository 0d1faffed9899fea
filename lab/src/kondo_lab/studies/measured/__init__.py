"""Seconds instead of counted passes: what a gated step really saves."""

from kondo_lab.studies.measured.analysis import analyse
from kondo_lab.studies.measured.run import parts
from kondo_lab.studies.measured.settings import settings
from kondo_lab.studies.study import Study

STUDY = Study(
    name="measured",
    title="The gate's speed-up, measured and not counted",
    paper="beyond the papers; beside Kondo Fig 3, which counts passes",
    claim=(
        "Counting passes, DG-K 3% is 1.41 (1 + c) / (1 + 0.03 c) times faster than PG to 5% test "
        "error. By the clock the gate pays where a step computes, and does not where a step is "
        "mostly the launching of small kernels."
    ),
    differences=(
        "The paper counts a forward and c for a backward and measures no time; here c is the "
        "seconds of the backward over those of the forward, for each workload.",
        "Seeds are rounds: each times every method once, and a speed-up is a ratio inside a round. "
        "Numbers are medians over rounds, with a standard error of the median from p20 and p80.",
        "The paper's gate pays a forward for every sample. Our engine skips it where the sampler's "
        "log-probs are the screen (free), and pays one without a graph otherwise (exact); kept "
        "rows are then run forward again, with a graph.",
        "Pixels and labels are random: no time depends on them. The policy is as drawn.",
        "Steps to 5% test error are those of width 100 and batch 100, whatever is timed.",
        "Dense steps are plain PyTorch, so that only the gate pays for the engine's bookkeeping.",
        "float32 throughout, on CUDA without TF32.",
    ),
    version=1,
    settings=settings,
    parts=parts,
    analyse=analyse,
)
