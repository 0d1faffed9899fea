"""Draft screens: let something cheaper than the policy decide what is worth a backward pass."""

from kondo_lab.studies.speculative.analysis import analyse
from kondo_lab.studies.speculative.run import parts
from kondo_lab.studies.speculative.settings import settings
from kondo_lab.studies.study import Study

STUDY = Study(
    name="speculative",
    title="Draft screens: deciding by less than the policy",
    paper="beyond the papers",
    claim=(
        "A gate needs the order of delight, not its value: a screen that is noisy, old, rounded or "
        "narrower keeps most of the rows that the policy itself would keep, and ends at a similar "
        "error for less."
    ),
    differences=(
        "The Kondo paper proposes cheap screens and reports noise on delight and logits (Fig 4); "
        "stale, quantised and narrower screens are ours.",
        "A screen gives the gate's delight its surprisal and its baseline sum_a pi(a)^2. Rewards "
        "come from the policy that acted, and kept rows are trained with its own advantages. Noise "
        "in the surprisal alone, as in version 1, stands beside.",
        "Ranked by advantage alone, rows have the baseline of the policy that acted, not counted.",
        "Weights begin lecun normal with biases of 0, the default of JAX's libraries.",
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
