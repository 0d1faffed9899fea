from kondo_lab.findings import findings
from kondo_lab.summary import summarise
from lab.examples import comparison


def test_one_finding_per_task_with_the_measured_numbers():
    digits, reversal = findings(summarise(comparison()))
    assert digits.startswith("digits: DG-K (3%) paid for 3.0% of the backward passes")
    assert reversal.startswith("reversal: ")
    assert "23.1 ±0.5% (PG 42.4 ±0.5% and DG 13.5 ±0.5%)" in digits
    assert "ran at 6.00x, where the count of kept rows alone would allow 33x" in digits
    assert "choosing units took 500.0 ms a step and the kept rows 500.0 ms" in digits
    assert "against 6000.0 ms dense" in digits
    assert "slower" not in digits


def test_a_slower_learner_is_called_slower_and_why():
    # 8 s to choose against 6 s dense.
    digits, _ = findings(summarise(comparison(gate=8.0)))
    assert "Its learner was slower than dense, 0.71x: choosing units took 8000.0 ms" in digits
    assert "too small to earn them back" in digits
