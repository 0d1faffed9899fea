"""Many actors and a learner, simulated at costs that are measured on this machine."""

from kondo_lab.evidence.study import Study
from kondo_lab.studies.scale.analysis import analyse
from kondo_lab.studies.scale.run import parts
from kondo_lab.studies.scale.settings import settings

STUDY = Study(
    name="scale",
    title="Ten to ten thousand actors, simulated",
    paper="beyond the papers; the distributed paper measures no system",
    claim=(
        "A simulation with costs measured on this machine predicts the pace of real Ray runs with "
        "1 to 8 actors within 20%. Beyond 10 actors the learner limits the pace. Dropping rows at "
        "the source saves bytes and never costs more than 1% of the pace. Staleness is actors x "
        "queue / rollouts per step - 1, whatever is dropped."
    ),
    differences=(
        "Costs are those of small policies on one core each, with a learning rate of 1e-6 so that "
        "the policy hardly changes. A larger policy has other proportions.",
        "Real runs share this machine's cores and have no network; simulated actors have a core "
        "each and reach the learner's machine over a link of the stated bandwidth and latency.",
        "Actors' links are never the limit. Weights travel once per version and machine, from the "
        "learner's machine alone, though Ray may copy from a neighbour.",
        "A faster learner does its own work in a stated fraction of the time; Ray's work is the "
        "same.",
        "Times are log-normal about their medians and independent. No process fails.",
        "Rates are kept exactly, and a kept row costs the same at every rate.",
        "The effect of staleness and larger steps on learning is not simulated.",
    ),
    version=1,
    settings=settings,
    parts=parts,
    analyse=analyse,
)
