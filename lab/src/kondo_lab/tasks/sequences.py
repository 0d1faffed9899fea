"""Further sequence tasks: bit parity, key-value look-up, subsequence match.

Prompts and answers differ in length here, and some answers need more than moving tokens about.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from kondo_lab.draws import Draws
from kondo_lab.tasks.base import Credit, SequenceTask, at_least, permutations


class BitParity(SequenceTask):
    """Read random bits; write, at each place, the parity of the bits up to and including it.

    One wrong step flips all that follows, unless a second one flips it back.

    Args:
        length: bits read and written.
        reward: see SequenceTask.
        kappa: see SequenceTask.

    Example:
        >>> import torch
        >>> from kondo_lab.tasks.sequences import BitParity
        >>> BitParity(length=5).target(torch.tensor([1, 0, 1, 1, 0]))
        tensor([1, 1, 0, 1, 1])
    """

    def __init__(self, *, length: int, reward: Credit = "to_first_error", kappa: float = 1.0):
        at_least("length", length, 1)
        super().__init__(
            "bit parity",
            prompt_length=length,
            answer_length=length,
            num_tokens=2,
            reward=reward,
            kappa=kappa,
        )

    def prompts(self, draws: Draws, step: int | Tensor, num_prompts: int) -> Tensor:
        """Return uniform bits."""
        return draws.integers("task/prompts", step, 2, num_prompts, self.prompt_length)

    def target(self, prompts: Tensor) -> Tensor:
        """Return the running parity."""
        return prompts.cumsum(dim=-1) % 2


class KeyValue(SequenceTask):
    """Read pairs and then some of their keys; write the values of these keys, in order.

    The prompt is k1 v1 ... kn vn q1 ... qm: keys distinct, values uniform, queries m of the keys
    in random order. Tokens 0 .. num_keys-1 are keys, the rest of the vocabulary is values.

    Args:
        num_pairs: n, at most num_keys.
        num_keys: keys there are.
        num_values: values there are.
        num_queries: m, at most n; all keys by default.
        reward: see SequenceTask.
        kappa: see SequenceTask.

    Example:
        >>> import torch
        >>> from kondo_lab.tasks.sequences import KeyValue
        >>> task = KeyValue(num_pairs=2, num_keys=5, num_values=3)
        >>> task.target(torch.tensor([4, 7, 0, 5, 0, 4]))  # 4 -> 7, 0 -> 5; asked for 0, then 4
        tensor([5, 7])
    """

    def __init__(
        self,
        *,
        num_pairs: int,
        num_keys: int,
        num_values: int,
        num_queries: int | None = None,
        reward: Credit = "to_first_error",
        kappa: float = 1.0,
    ):
        num_queries = num_pairs if num_queries is None else num_queries
        at_least("num_queries", num_queries, 1)
        at_least("num_pairs", num_pairs, num_queries)  # no key is asked for twice
        at_least("num_keys", num_keys, num_pairs)  # the keys of a prompt are distinct
        at_least("num_values", num_values, 2)
        super().__init__(
            "key-value",
            prompt_length=2 * num_pairs + num_queries,
            answer_length=num_queries,
            num_tokens=num_keys + num_values,
            reward=reward,
            kappa=kappa,
        )
        self.num_pairs, self.num_keys, self.num_values = num_pairs, num_keys, num_values

    def prompts(self, draws: Draws, step: int | Tensor, num_prompts: int) -> Tensor:
        """Return the pairs, then the queries."""
        keys = permutations(draws, "task/keys", step, num_prompts, self.num_keys)
        keys = keys[..., : self.num_pairs]
        values = self.num_keys + draws.integers(
            "task/values", step, self.num_values, num_prompts, self.num_pairs
        )
        asked = permutations(draws, "task/queries", step, num_prompts, self.num_pairs)
        queries = keys.gather(-1, asked[..., : self.answer_length])
        return torch.cat([torch.stack([keys, values], dim=-1).flatten(-2), queries], dim=-1)

    def target(self, prompts: Tensor) -> Tensor:
        """Return the value that stands after each queried key."""
        pairs, queries = _split(prompts, 2 * self.num_pairs)
        keys, values = pairs[..., 0::2], pairs[..., 1::2]
        asked = queries.unsqueeze(-1) == keys.unsqueeze(-2)  # true at one key of each query
        return (asked * values.unsqueeze(-2)).sum(dim=-1)


class SubsequenceMatch(SequenceTask):
    """Read a pattern and a text; mark with 1 each place of the text that belongs to an occurrence.

    The pattern stands in the text at least once, at a uniform place, as neighbouring tokens. By
    chance it may stand there again, also overlapping: every occurrence is marked, so the answer is
    unique. A share of about pattern_length / length is marked, hence zeros alone earn the rest.

    Args:
        length: of the text and of the answer.
        pattern_length: at most length.
        num_tokens: of pattern and text; the answer uses 0 and 1.
        reward: see SequenceTask.
        kappa: see SequenceTask.

    Example:
        >>> import torch
        >>> from kondo_lab.tasks.sequences import SubsequenceMatch
        >>> task = SubsequenceMatch(length=6, pattern_length=2, num_tokens=3)
        >>> task.target(torch.tensor([2, 1, 0, 2, 1, 1, 2, 1]))  # 21 in 021121
        tensor([0, 1, 1, 0, 1, 1])
    """

    def __init__(
        self,
        *,
        length: int,
        pattern_length: int,
        num_tokens: int,
        reward: Credit = "to_first_error",
        kappa: float = 1.0,
    ):
        at_least("pattern_length", pattern_length, 1)
        at_least("length", length, pattern_length)
        super().__init__(
            "subsequence match",
            prompt_length=pattern_length + length,
            answer_length=length,
            num_tokens=num_tokens,
            reward=reward,
            kappa=kappa,
        )
        self.pattern_length = pattern_length

    def prompts(self, draws: Draws, step: int | Tensor, num_prompts: int) -> Tensor:
        """Return the pattern, then uniform tokens with the pattern written over them once."""
        size, length = self.pattern_length, self.answer_length
        tokens = draws.integers("task/tokens", step, self.num_tokens, num_prompts, size + length)
        pattern, text = _split(tokens, size)
        first = draws.integers("task/places", step, length - size + 1, num_prompts, 1)
        within = torch.arange(length, device=text.device) - first  # place in the pattern
        planted = pattern.gather(-1, within.clamp(0, size - 1))
        inside = (within >= 0) & (within < size)
        return torch.cat([pattern, torch.where(inside, planted, text)], dim=-1)

    def target(self, prompts: Tensor) -> Tensor:
        """Return the marks."""
        size = self.pattern_length
        pattern, text = _split(prompts, size)
        starts = (text.unfold(-1, size, 1) == pattern.unsqueeze(-2)).all(dim=-1)
        # A place belongs to an occurrence that starts there or at one of the size-1 places before.
        around = F.pad(starts.long(), (size - 1, size - 1))
        return around.unfold(-1, size, 1).amax(dim=-1)


def _split(tokens: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """Return the first tokens and the others."""
    return tokens[..., :first], tokens[..., first:]
