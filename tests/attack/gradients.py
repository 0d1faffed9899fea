"""Compare `.grad` with the gradient of a loss, as loosely as `kondo.check` does and some more."""

import torch

LIMIT, SMALL, NOTHING = 1e-2, 0.01, 1e-4


def assert_gradients(module, loss, limit=LIMIT):
    """Fail unless `.grad` of every parameter is the gradient of the loss.

    Norms are compared; the limit is a share of a parameter's own, of `SMALL` of the largest, or of
    `NOTHING`, which is rounding.
    """
    named = {name: each for name, each in module.named_parameters() if each.requires_grad}
    found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    pairs = zip(found, named.values(), strict=True)
    wanted = [torch.zeros_like(p) if g is None else g for g, p in pairs]
    largest = max(float(each.norm()) for each in wanted)
    for (name, parameter), expected in zip(named.items(), wanted, strict=True):
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        error, size = float((grad - expected).norm()), float(expected.norm())
        assert error <= limit * max(size, SMALL * largest, NOTHING), (
            f"silently wrong: {name} by {error}"
        )
