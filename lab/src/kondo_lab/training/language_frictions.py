"""What goes wrong between actors and learner, for P members of a population at once.

    weights -> actors -> answers -> broken answers -> rewards -> corrupted rewards
                              \\-> log-probs as reported

| friction    | what happens                                                                    |
|-------------|---------------------------------------------------------------------------------|
| staleness   | actors get the learner's weights every `refresh` steps, or `lag` steps late      |
| mismatch    | actors sample at another `temperature`, or with weights rounded to `bits` bits   |
| asynchrony  | actors go on while the learner learns: see `asynchronous`                        |
| bugs        | a share of the answers is truncated, empty, repeats a token, or belongs to       |
|             | another prompt                                                                  |
| discoveries | a share of the answers is replaced by a right one, which the task demonstrates   |
| corruption  | a share of the rewards is a fair coin, flipped, or 1                             |
| reports     | log-probs of the actors are noisy, 0 (probability one), or missing               |

Strengths are [P] tensors and nothing is read from the device, so that a step with frictions is one
CUDA graph. A strength of 0 changes no bit of a member, whatever the others have.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from kondo_lab.models.networks import Parameters
from kondo_lab.models.sampler import Sampled, completion_mask
from kondo_lab.tasks.draws import Draws
from kondo_lab.tasks.text.alphabet import END, PAD

Reported = Literal["true", "noisy", "one", "missing"]
_SHARES = ("broken", "discovered", "coin", "flipped", "biased")
_TRUNCATED, _EMPTY, _REPEATED, _OTHER = range(4)
"""Kinds of broken answers, equally frequent."""
_UNQUANTISED = ("tokens", "positions", "head")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Friction:
    """One way in which actors and learner differ. The default is none; strengths compose.

    Example:
        >>> from kondo_lab.training.language_frictions import Friction
        >>> Friction(name="stale and broken", refresh=16, broken=0.1).is_none
        False
    """

    name: str = "no friction"
    """As in tables."""
    refresh: int = 1
    """D: actors get the learner's weights before steps 1, D + 1, 2 D + 1, ..."""
    lag: int = 0
    """L: actors of step t have the weights of step t - L, of the start before there are any."""
    uniform: bool = False
    """Draw the lag of every step uniformly from 0 .. `lag`."""
    queue: int = 0
    """Q: actors and learner run at the same time, and Q batches may wait between them; 0 takes
    turns. For `asynchronous.AsynchronousPopulation` alone."""
    temperature: float = 1.0
    """Actors sample from softmax(logits / temperature), and report its log-probs."""
    bits: int = 0
    """Of the actors' weights in the layers, one scale for each output of a product; 0 does not
    round."""
    broken: float = 0.0
    """Share of broken answers. They are paid what the task's checker pays. Log-probs are those of
    the tokens that were drawn, hence wrong for what is trained on."""
    discovered: float = 0.0
    """Share of answers that a demonstrator gives: right, often unlikely for the learner. It never
    errs or hesitates, so its log-probs are 0."""
    coin: float = 0.0
    """Share of rewards that a fair coin replaces."""
    flipped: float = 0.0
    """Share of rewards that are 1 - reward."""
    biased: float = 0.0
    """Share of rewards that a judge sets to 1."""
    reported: Reported = "true"
    """Log-probs that the learner gets: those of the actors' distribution; with normal noise; 0, as
    of probability one; or none, where it takes its own at the update: all ratios are 1."""
    noise: float = 0.0
    """Standard deviation of the noise on every token's log-prob, for reported="noisy"."""

    def __post_init__(self) -> None:
        if self.refresh < 1:
            raise ValueError(f"refresh must be >= 1 step, got {self.refresh}; 1 is on-policy.")
        if self.lag < 0 or (self.uniform and not self.lag):
            raise ValueError(
                f"lag must be >= 0 steps, and > 0 where it is uniform, got {self.lag}."
            )
        if self.queue < 0:
            raise ValueError(f"queue must be >= 0 batches, got {self.queue}; 0 takes turns.")
        if sum((self.lag > 0, self.refresh > 1, self.queue > 0)) > 1:
            raise ValueError(
                f"actors must be stale in one way, got lag {self.lag}, refresh {self.refresh} and "
                f"queue {self.queue}; leave two of them at 0, 1 and 0."
            )
        if not self.temperature > 0:
            raise ValueError(f"temperature must be > 0, got {self.temperature}.")
        if self.bits and not 2 <= self.bits <= 16:
            raise ValueError(
                f"bits must lie in 2 .. 16, got {self.bits}; 0 leaves weights as they are."
            )
        for name in _SHARES:
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"{name} must lie in [0, 1], got {getattr(self, name)}.")
        if (self.noise > 0) != (self.reported == "noisy"):
            raise ValueError(
                f"noise must be > 0 for reported='noisy' and 0 otherwise, got {self.noise} for "
                f"{self.reported!r}."
            )

    @property
    def is_none(self) -> bool:
        """Whether nothing goes wrong."""
        return dataclasses.replace(self, name=NONE.name) == NONE

    @property
    def reports_truly(self) -> bool:
        """Whether the learner gets the log-probs that the actors drew with."""
        return self.reported == "true"


NONE = Friction()


class _Ring:
    """The last versions of the weights of members whose actors lag behind.

    Args:
        frictions: of all P members, at least one with a lag.
        parameters: of the learners, [P, ...] each.
        draws: random sources of all members.
    """

    def __init__(self, frictions: Sequence[Friction], parameters: Parameters, draws: Draws):
        device = parameters["head"].device
        lags = {place: each for place, each in enumerate(frictions) if each.lag}
        self._places = torch.tensor(list(lags), device=device)
        self._lags = torch.tensor([each.lag for each in lags.values()], device=device)
        self._uniform = torch.tensor([each.uniform for each in lags.values()], device=device)
        self._size = 1 + max(each.lag for each in lags.values())
        self._draws = draws
        own = {name: value[self._places] for name, value in parameters.items()}
        needed = self._size * sum(value.numel() * value.element_size() for value in own.values())
        if needed > RING_BYTES:
            raise ValueError(
                f"lag must be so short that {self._size} versions of the weights of {len(lags)} "
                f"members fit {RING_BYTES / 2**30:.0f} GiB, got {needed / 2**30:.1f} GiB; train "
                f"fewer of them in one population."
            )
        self.versions = {
            name: value.unsqueeze(0).repeat(self._size, *[1] * value.dim())
            for name, value in own.items()
        }

    def actors(self, parameters: Parameters, step: Tensor) -> Parameters:
        """Keep the learners' weights of a step, and return those that sample."""
        now = (step - 1) % self._size
        drawn = self._draws.uniform("lag", step, 1)[self._places, 0]
        late = torch.where(self._uniform, (drawn * (self._lags + 1)).long(), self._lags)
        slot = (step - 1 - late).clamp(min=0) % self._size
        each = torch.arange(len(self._places), device=slot.device)
        found = {}
        for name, value in parameters.items():
            own = self.versions[name]
            own.index_copy_(0, now.view(1), value[self._places].unsqueeze(0))
            found[name] = value.index_copy(0, self._places, own[slot, each])
        return found


RING_BYTES = 64 * 2**30
"""Most memory of past weights of one population."""


class Frictions:
    """The frictions of P members, and the weights of their actors.

    Args:
        frictions: one per member.
        parameters: of the learners, [P, ...] each.
        draws: random sources of the members.
    """

    def __init__(self, frictions: Sequence[Friction], parameters: Parameters, draws: Draws):
        self._draws = draws
        device, dtype = parameters["head"].device, parameters["head"].dtype

        def strengths(name: str, neutral: float, kind: torch.dtype) -> Tensor | None:
            """Return [P], or None where nobody has this friction."""
            values = [getattr(each, name) for each in frictions]
            if all(value == neutral for value in values):
                return None
            return torch.tensor(values, dtype=kind, device=device)

        def reports(kind: Reported) -> Tensor | None:
            found = [each.reported == kind for each in frictions]
            return torch.tensor(found, device=device) if any(found) else None

        self._refresh = strengths("refresh", 1, torch.int64)
        self._levels = None
        if any(each.bits for each in frictions):
            levels = [float(2 ** (each.bits - 1) - 1) if each.bits else 0.0 for each in frictions]
            self._levels = torch.tensor(levels, dtype=dtype, device=device)
        self.temperature = strengths("temperature", 1.0, dtype)
        """[P] of the samplers; None where all are 1."""
        self._shares = {name: strengths(name, 0.0, torch.float32) for name in _SHARES}
        self._noise = strengths("noise", 0.0, dtype)
        self._one = reports("one")
        self.missing = reports("missing")
        """bool [P]: no log-probs are reported; None where all are."""
        self._stale: Parameters = {}
        if self._refresh is not None:
            self._stale = {name: value.clone() for name, value in parameters.items()}
        lagging = any(each.lag for each in frictions)
        self._ring = _Ring(frictions, parameters, draws) if lagging else None

    def actors(self, parameters: Parameters, step: Tensor) -> Parameters:
        """Return the weights that sample at a step counted from 1, given the learners'."""
        if self._refresh is not None:
            fresh = (step - 1) % self._refresh == 0
            for name, own in self._stale.items():
                own.copy_(torch.where(_beside(fresh, own), parameters[name], own))
            parameters = self._stale
        if self._ring is not None:
            parameters = self._ring.actors(parameters, step)
        if self._levels is None:
            return parameters
        return {
            name: value if name in _UNQUANTISED else rounded(value, self._levels)
            for name, value in parameters.items()
        }

    def hand_over(
        self,
        sampled: Sampled,
        step: Tensor,
        repeats: int,
        show: Callable[[Tensor], Tensor],
    ) -> Sampled:
        """Return the answers and log-probs that the learner gets, of those that were drawn.

        Args:
            sampled: as drawn, N = G * repeats answers.
            step: counted from 1.
            repeats: A, answers of a prompt.
            show: prompts [P, N, Lp] -> right answers [P, N, La], for discoveries.
        """
        broken, discovered = (
            self._chance(name, step, sampled.mask.shape[1]) for name in ("broken", "discovered")
        )
        if broken is not None:
            sampled = self._broken(sampled, broken, step, repeats)
        if discovered is not None:
            sampled = _with_discoveries(sampled, show(sampled.prompts), discovered)
        log_probs = sampled.log_probs
        if self._noise is not None:
            drawn = self._draws.normal("reported", step, *log_probs.shape[1:]).to(log_probs.dtype)
            noisy = log_probs + drawn * _beside(self._noise, log_probs)
            # Not "+ 0 * noise" for the others: a log-prob of -0 would change its sign.
            log_probs = torch.where(_beside(self._noise > 0, log_probs), noisy, log_probs)
        if self._one is not None:
            log_probs = torch.where(_beside(self._one, log_probs), 0.0, log_probs)
        return sampled._replace(log_probs=torch.where(sampled.mask, log_probs, 0.0))

    def corrupt(self, rewards: Tensor, step: Tensor) -> Tensor:
        """Return the rewards [P, N] that the learner gets."""
        coin, flipped, biased = (
            self._chance(name, step, rewards.shape[1]) for name in ("coin", "flipped", "biased")
        )
        if coin is not None:
            heads = self._draws.uniform("coin side", step, rewards.shape[1]) < 0.5
            rewards = torch.where(coin, heads.to(rewards.dtype), rewards)
        if flipped is not None:
            rewards = torch.where(flipped, 1 - rewards, rewards)
        return rewards if biased is None else torch.where(biased, 1.0, rewards)

    def state_dict(self) -> dict[str, Parameters]:
        """Return what the next step depends on: weights that actors have or may still get."""
        return {"stale": self._stale, "ring": {} if self._ring is None else self._ring.versions}

    def load_state_dict(self, state: dict[str, Parameters]) -> None:
        """Restore, in place, what `state_dict` returned."""
        for kind, own in self.state_dict().items():
            for name, value in own.items():
                value.copy_(state[kind][name])

    def _chance(self, name: str, step: Tensor, rows: int) -> Tensor | None:
        """Return bool [P, N]: whom it hits; None where nobody has this friction."""
        share = self._shares[name]
        if share is None:
            return None
        return self._draws.uniform(f"friction {name}", step, rows) < share.unsqueeze(1)

    def _broken(self, sampled: Sampled, hit: Tensor, step: Tensor, repeats: int) -> Sampled:
        rows = sampled.mask.shape[1]
        kind = self._draws.integers("broken kind", step, 4, rows)
        where = self._draws.uniform("broken place", step, rows)
        completions, mask = break_answers(sampled, kind, where, repeats)
        hit = hit.unsqueeze(2)
        tokens = torch.cat(
            [sampled.prompts, torch.where(hit, completions, sampled.completions)], dim=2
        )
        return sampled._replace(tokens=tokens, mask=torch.where(hit, mask, sampled.mask))


def _with_discoveries(sampled: Sampled, shown: Tensor, hit: Tensor) -> Sampled:
    """Return the answers with those that were hit, bool [P, N], replaced by what was shown."""
    hit = hit.unsqueeze(2)
    answers = torch.where(hit, shown, sampled.completions)
    return sampled._replace(
        tokens=torch.cat([sampled.prompts, answers], dim=2),
        log_probs=torch.where(hit, 0.0, sampled.log_probs),
        mask=torch.where(hit, completion_mask(shown), sampled.mask),
    )


def rounded(weights: Tensor, levels: Tensor) -> Tensor:
    """Return weights [P, in, out] as integers up to `levels` [P], times one scale per output.

    scale = max |w| / levels,  w -> round(w / scale) * scale;  levels of 0 leave w. Integers of b
    bits have 2^(b - 1) - 1 levels.

    Example:
        >>> import torch
        >>> from kondo_lab.training.language_frictions import rounded
        >>> rounded(torch.tensor([[[3.0], [0.9]]]), torch.tensor([3.0]))
        tensor([[[3.],
                 [1.]]])
    """
    highest = weights.abs().amax(dim=-2, keepdim=True)
    scale = highest / _beside(levels, weights).clamp(min=1)
    scale = torch.where(scale == 0, 1.0, scale)
    return torch.where(_beside(levels > 0, weights), (weights / scale).round() * scale, weights)


def break_answers(
    sampled: Sampled, kind: Tensor, where: Tensor, repeats: int
) -> tuple[Tensor, Tensor]:
    """Return every answer broken, int64 [P, N, La], and its mask.

    | kind | answer                                                    |
    |------|-----------------------------------------------------------|
    | 0    | truncated after a drawn token, without END                |
    | 1    | empty: END alone                                          |
    | 2    | from a drawn token on that token alone, without END       |
    | 3    | that of the same place in the group before: another prompt |

    Args:
        sampled: N = G * repeats answers.
        kind: int64 [P, N], 0 .. 3.
        where: [P, N] uniform on (0, 1), of the drawn token.
        repeats: A, answers of a prompt.
    """
    completions, mask = sampled.completions, sampled.mask
    place = torch.arange(mask.shape[2], device=mask.device)
    # The last token that stays as it is: any but the last of the answer, if there are two.
    last = (where * (mask.sum(dim=2) - 1)).long().unsqueeze(2)
    inside = place <= last
    truncated = torch.where(inside, completions, PAD)
    empty = torch.where(place == 0, END, torch.full_like(place, PAD)).expand_as(completions)
    repeated = torch.where(inside, completions, completions.gather(2, last))
    other, other_mask = completions.roll(repeats, dims=1), mask.roll(repeats, dims=1)
    of_repeated = completion_mask(repeated)
    tokens, counted = other, other_mask
    for number, answer, own in (
        (_TRUNCATED, truncated, inside),
        (_EMPTY, empty, (place == 0).expand_as(mask)),
        (_REPEATED, repeated, of_repeated),
    ):
        chosen = (kind == number).unsqueeze(2)
        tokens, counted = torch.where(chosen, answer, tokens), torch.where(chosen, own, counted)
    return torch.where(counted, tokens, PAD), counted


def _beside(values: Tensor, other: Tensor) -> Tensor:
    """Return values [P] shaped to stand beside another tensor [P, ...]."""
    return values.view(-1, *[1] * (other.dim() - 1))
