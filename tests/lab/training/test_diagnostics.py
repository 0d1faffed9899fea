import torch

from kondo_lab.training.diagnostics import effective_share
from tolerances import assert_close


def test_the_effective_share_counts_equal_weights_as_one():
    mask = torch.tensor([[[True, True], [True, False], [True, True]]])
    zeros = torch.zeros(1, 3, 2)
    advantages = torch.tensor([[[2.0], [-1.0], [0.0]]])
    third = torch.tensor([1.0]).double() / 3
    equal = torch.tensor([[[-2.0, 2.0], [1.0, 0.0], [0.0, 0.0]]])
    assert_close(effective_share(equal, advantages, mask, None), torch.tensor([1.0]).double())
    single = torch.tensor([[[-2.0, 0.0], [0.0, 0.0], [0.0, 0.0]]])
    assert_close(effective_share(single, advantages, mask, None), third)
    rows = torch.tensor([[1]])
    assert_close(effective_share(equal[:, 1:2], advantages, mask, rows), third)
    assert effective_share(zeros, advantages, mask, None).item() == 0
