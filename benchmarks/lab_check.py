"""Does a population train as plain PyTorch does? Both gradients, on the same rows."""

import torch
from torch import Tensor, nn

from kondo_lab.models.decoder_module import Decoder
from kondo_lab.models.networks import MLP
from kondo_lab.training.population import Population
from plain_loop import Experience, MethodName, loss


def gradient_error(population: Population, twin: MLP | Decoder, method: MethodName) -> float:
    """Return how far the first member's gradient lies from the plain one, relative, in norm.

    Args:
        population: of one method; its weights are not moved.
        twin: a policy of the same shape; gets the first member's weights.
        method: of the plain loss.
    """
    population.roll(torch.zeros((), dtype=torch.int64, device=population.device))
    (group,) = population.groups
    kept = int(group.decisions[0].kept.max())
    ours = group.gradients(population, group.num_rows(kept, population.program.num_rows))
    twins = named_parameters(twin)
    with torch.no_grad():
        for name, value in population.parameters.items():
            twins[name].copy_(_as_policy_has_it(name, value[0]))
    experience = first_experience(twin, population.rolled)
    log_probs = twin.log_prob(experience.rows).view_as(experience.log_probs)
    plain = torch.autograd.grad(
        loss(log_probs, method, experience), [twins[name] for name in population.parameters]
    )
    error = total = 0.0
    for name, own, reference in zip(population.parameters, ours, plain, strict=True):
        difference = _as_policy_has_it(name, own[0]) - reference
        error += float(difference.double().square().sum())
        total += float(reference.double().square().sum())
    return float((error / total) ** 0.5)


def first_experience(policy: MLP | Decoder, rolled: dict[str, Tensor]) -> Experience:
    """Return what the first member of a population went through, as the plain loop has it."""
    rewards = rolled["rewards"][0]
    if isinstance(policy, MLP):
        probs = rolled["distribution"][0].exp()
        rows = {"images": rolled["inputs"][0], "actions": rolled["actions"][0].squeeze(1)}
        advantages = rewards - probs.square().sum(dim=1, keepdim=True)
        return Experience(rows, rolled["log_probs"][0], advantages)
    prompts = rolled["prompts"][0].repeat_interleave(rewards.shape[1], dim=0)
    rows = {"prompts": prompts, "answers": rolled["answers"][0].flatten(0, 1)}
    advantages = (rewards - rewards.mean(dim=1, keepdim=True)).view(-1, 1)
    return Experience(rows, rolled["log_probs"][0], advantages)


def named_parameters(policy: MLP | Decoder) -> dict[str, Tensor]:
    """Return a policy's parameters under the population's names."""
    if isinstance(policy, MLP):
        layers = [layer for layer in policy.layers if isinstance(layer, nn.Linear)]
        return {
            f"{number}.{kind}": getattr(layer, kind)
            for number, layer in enumerate(layers)
            for kind in ("weight", "bias")
        }
    backbone = policy.backbone
    named: dict[str, Tensor] = {
        "tokens": backbone.tokens,
        "positions": backbone.positions,
        "head": policy.head.weight,
    }
    start = "layers."
    for name, value in backbone.named_parameters():
        if name.startswith(start):
            named[name.removeprefix(start).replace("weights.", "")] = value
    return named


def _as_policy_has_it(name: str, stacked: Tensor) -> Tensor:
    """Return one member's tensor in the policy's shape: Linear keeps [out, in], we [in, out]."""
    if name.endswith(("bias", "norm")):
        return stacked.flatten()
    return stacked.T if name.endswith(("weight", "head")) else stacked
