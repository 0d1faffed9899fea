"""The distributed paper's bandit: what samples on disfavoured actions do to a gradient."""

from kondo_lab.studies.contamination.analysis import analyse
from kondo_lab.studies.contamination.run import parts
from kondo_lab.studies.contamination.settings import settings
from kondo_lab.studies.study import Study

STUDY = Study(
    name="contamination",
    title="A bandit whose samples are contaminated",
    paper="Distributed paper, section 4: Lemma 1, Corollary 1, Proposition 3; second moment of v2",
    claim=(
        "A share rho of the samples comes from disfavoured actions, the policy errs with "
        "probability delta. DG's gate passes at most pi(a)^(1/(2 eta)) of them, so that what "
        "contaminates DG vanishes against what contaminates PG as delta falls. No weight that "
        "ignores the reward's sign drops rare failures and keeps rare successes."
    ),
    differences=(
        "The paper's text was not at hand: the set-up is K arms with equal wrong ones, one "
        "context, logit space, and the propositions are read as others summarise them.",
        "The overlap factor of the second moment, sum_a nu(a) pi(a)^(1/eta), is inferred from the "
        "abstract of version 2, not read.",
        "Contamination of one wrong arm is the hard case; contamination spread evenly over the "
        "wrong arms points along the true gradient in expectation, and is shown beside it.",
        "Signal over contamination, rare successes and many contexts are our own measures.",
    ),
    version=1,
    settings=settings,
    parts=parts,
    analyse=analyse,
)
