"""Hand-made results for the tests of tables, figures and reports."""

from kondo_lab.summary import RunResult
from kondo_lab.train import StepRecord


def record(error, *, samples=100, paid=100, sampling=1.0, gate=0.0, forward=2.0, backward=4.0):
    return StepRecord(error, samples, paid, sampling, gate, forward, backward, 1.0)


def result(method, records, *, task="digits", seed=0, test_error=None):
    return RunResult(
        task=task,
        method=method,
        dense=method in ("PG", "DG"),
        seed=seed,
        records=records,
        test_error=test_error,
    )


def comparison(*, gate=0.5, num_steps=40):
    """Two tasks, three methods, two seeds; the gated learner takes gate + 0.25 + 0.25 a step."""
    results = []
    for task in ("digits", "reversal"):
        for seed in (0, 1):
            for method, end in (("PG", 0.4), ("DG", 0.1), ("DG-K (3%)", 0.2)):
                errors = [0.9 + (end - 0.9) * step / num_steps for step in range(num_steps)]
                cost = {"paid": 3, "gate": gate, "forward": 0.25, "backward": 0.25}
                cost = cost if method.startswith("DG-K") else {}
                results.append(
                    result(
                        method,
                        [record(error + 0.01 * seed, **cost) for error in errors],
                        task=task,
                        seed=seed,
                        test_error=0.05 + 0.02 * seed if task == "digits" else None,
                    )
                )
    return results
