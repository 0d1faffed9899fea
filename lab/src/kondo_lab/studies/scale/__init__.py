"""Beyond this machine: simulated actors and a learner, at costs measured here."""

from kondo_lab.studies.scale.analysis import analyse
from kondo_lab.studies.scale.run import parts
from kondo_lab.studies.scale.settings import settings
from kondo_lab.studies.study import Study

STUDY = Study(
    name="scale",
    title="Ten to ten thousand actors, simulated",
    paper="beyond the papers; the distributed paper measures no system",
    claim=(
        "A simulation driven by costs measured on this machine paces real Ray runs with 1 to 8 "
        "actors within 20%. Beyond a few actors the learner sets the pace; dropping at the source "
        "takes the rows it need not look at, and their bytes, off its way. Staleness is actors x "
        "queue / rollouts per step - 1, whatever is dropped."
    ),
    differences=(
        "Costs are those of small policies on one core each, with a learning rate of 1e-6 so that "
        "the policy stays as drawn; a larger policy has other proportions.",
        "Real runs share this machine's cores and have no network; simulated actors have a core "
        "each and reach the learner's machine over a link of the stated bandwidth and latency.",
        "Actors' links are never the limit. Weights travel once per version and machine, from the "
        "learner's machine alone, though Ray may copy from a neighbour.",
        "A faster learner is one whose own work takes a stated fraction; Ray's work stays.",
        "Times are log-normal about their medians, and independent. Nobody dies.",
        "Rates are kept exactly, and a kept row costs the same at every rate.",
        "What staleness and larger steps do to learning is not simulated.",
    ),
    version=1,
    settings=settings,
    parts=parts,
    analyse=analyse,
)
