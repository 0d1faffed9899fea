"""A TorchRL actor on two ranks: rows of TensorDicts move, and the gradient is that of one."""

import pytest
import torch
from torchrl.objectives import ClipPPOLoss

from integrations.torchrl import rank_case
from tolerances import assert_close


@pytest.mark.parametrize("splits", [(20, 20), (3, 37), (0, 40)])
def test_ranks_have_torchrls_gradient_with_skipped_advantages_zeroed(crew, splits):
    found = crew.run(rank_case.step, 2, splits, "delight:0.2")
    actor, data = rank_case.make()
    with torch.no_grad():
        surprisal = -actor.get_dist(data.copy()).log_prob(data["action"])
    best = (surprisal * data["advantage"].squeeze(-1)).topk(8).indices
    skipped = torch.ones(40, dtype=torch.bool).index_fill(0, best, False)
    data["advantage"][skipped] = 0.0
    loss = ClipPPOLoss(actor, None, clip_epsilon=0.2, entropy_bonus=False)
    loss(data)["loss_objective"].backward()
    for rank in found:
        assert rank["kept"] == 8
        for mine, parameter in zip(rank["grads"], actor.parameters(), strict=True):
            assert_close(mine, parameter.grad)
