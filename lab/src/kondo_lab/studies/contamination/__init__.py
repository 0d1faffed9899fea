"""The distributed paper's bandit: samples from disfavoured actions and their gradient."""

from kondo_lab.evidence.study import Study
from kondo_lab.studies.contamination.analysis import analyse
from kondo_lab.studies.contamination.run import parts
from kondo_lab.studies.contamination.settings import settings

STUDY = Study(
    name="contamination",
    title="A bandit whose samples are contaminated",
    paper="Distributed paper, section 4: Lemma 1, Corollary 1, Proposition 3; second moment of v2",
    claim=(
        "A share rho of the samples comes from disfavoured actions; the policy errs with "
        "probability delta. DG's gate passes at most pi(a)^(1/(2 eta)) of such failures, so DG's "
        "contamination vanishes relative to PG's as delta falls. No weight that ignores the "
        "reward's sign can drop rare failures and keep rare successes."
    ),
    differences=(
        "The paper's text was not available; its propositions are taken from summaries. The "
        "set-up is ours: K arms with equal wrong ones, one context, logit space.",
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
