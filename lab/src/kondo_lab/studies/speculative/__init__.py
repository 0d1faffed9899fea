"""Draft screens: something cheaper than the policy chooses what gets a backward pass."""

from kondo_lab.evidence.study import Study
from kondo_lab.studies.speculative.analysis import analyse
from kondo_lab.studies.speculative.run import parts
from kondo_lab.studies.speculative.settings import settings

STUDY = Study(
    name="speculative",
    title="Draft screens: cheaper than the policy",
    paper="beyond the papers",
    claim=(
        "A gate needs the order of delight, not its value. A noisy, old, rounded or narrower "
        "screen keeps most of the rows that the policy itself would keep, and ends at a similar "
        "error at a lower cost."
    ),
    differences=(
        "The Kondo paper proposes cheap screens and reports noise on delight and logits (Fig 4); "
        "stale, quantised and narrower screens are ours.",
        "A screen gives the surprisal and the baseline sum_a pi(a)^2 of delight. Rewards come from "
        "the policy that acted, and kept rows are trained with its own advantages. Noise in the "
        "surprisal alone, as in version 1, is a separate series.",
        "The screen by advantage alone uses the acting policy's baseline, which is not counted.",
        "Weights have the lecun-normal initialisation and biases are 0, the default of JAX's "
        "libraries.",
        "Costs are counted, not measured: a screen of cost s, then forward and backward of the "
        "kept rows, s x samples + (1 + c) x backward passes. The cost of a quantised screen is "
        "idealised, bits / 32.",
        "The learning rate is the paper's, not tuned per rate or screen.",
    ),
    version=2,
    settings=settings,
    parts=parts,
    analyse=analyse,
)
