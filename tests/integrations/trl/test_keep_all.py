"""A gate that keeps everything leaves TRL's weights, however its rows are regrouped."""

import pytest
import torch

import kondo
from integrations.trl.test_rate_one import LOSSES
from integrations.trl.tiny import trainer
from integrations.trl.versions import LUSPO_MASKS
from tolerances import assert_close

# Rows of unequal lengths in every micro-step; plain steps, which do not magnify rounding.
OPTIONS = {"per_device_train_batch_size": 2, "num_generations": 2, "optim": "sgd"}
OPTIONS |= {"learning_rate": 0.1, "max_grad_norm": 0.0, "max_steps": 3, "max_completion_length": 12}


class KeepAll(kondo.BaseGate):
    """Keeps rows of advantage 0 too, which no built-in gate does."""

    signal = staticmethod(kondo.delight)

    def choose(self, values, mask, generator=None):
        return kondo.Choice.of(mask, mask, dtype=values.dtype)


def weights(tmp_path, *, base, **options):
    """Weights after training."""
    trained = trainer(tmp_path, base=base, **OPTIONS, **options)
    if not base:
        trained.gate = KeepAll()
    trained.train()
    return trained.model.state_dict()


@pytest.mark.parametrize("entropy_coef", [0.0, 0.3])
@pytest.mark.parametrize("accumulation", [2, 4])
@pytest.mark.parametrize("loss_type", [kind for kind in LOSSES if kind != "luspo" or LUSPO_MASKS])
def test_the_weights_are_those_of_trl(tmp_path, loss_type, accumulation, entropy_coef):
    options = {"loss_type": loss_type, "entropy_coef": entropy_coef}
    options["gradient_accumulation_steps"] = accumulation
    expected = weights(tmp_path, base=True, **options)
    found = weights(tmp_path, base=False, kondo_gate="delight:0.5", **options)
    for name, value in expected.items():
        assert_close(found[name], value, torch.float32)
