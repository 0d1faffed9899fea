"""A run whose reward falls under a gate by delight is warned about; entropy is in the log."""

import math
import warnings

import pytest

from integrations.trl.tiny import trainer

STEPS = 26


class Falling:
    """Rewards of completions, and a constant that falls with every batch of them."""

    __name__ = "falling"

    def __init__(self):
        self.calls = 0

    def __call__(self, completion_ids, **kwargs):
        self.calls += 1
        # Flat for as long as a run is not judged, then down; groups differ as before.
        return [sum(ids) % 3 - 3.0 * max(0, self.calls - 20) for ids in completion_ids]


def train(tmp_path, **options):
    gated = trainer(
        tmp_path, reward_funcs=Falling(), max_steps=STEPS, learning_rate=1e-9, **options
    )
    gated.train()
    return [log for log in gated.state.log_history if "kondo/rate" in log]


def test_a_reward_that_falls_under_a_gate_by_delight_is_named_once(tmp_path):
    with pytest.warns(RuntimeWarning, match="under Gate") as caught:
        logs = train(tmp_path, kondo_gate="delight:0.3")
    told = [str(each.message) for each in caught if "under Gate" in str(each.message)]
    assert len(told) == 1
    assert "reward fell from" in told[0]
    assert "UnbiasedGate" in told[0]
    assert all(0 < log["kondo/entropy"] < math.log(22) * 1.5 for log in logs)


@pytest.mark.parametrize("by", ["unbiased", "variance"])
def test_other_gates_are_not_warned_about(tmp_path, by):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*under .*Gate")
        logs = train(tmp_path, kondo_gate=f"{by}:0.3")
    assert ("kondo/entropy" in logs[0]) == (by != "variance")  # which asks for no log-probs
    assert logs[0]["kondo/noise"] > 0
