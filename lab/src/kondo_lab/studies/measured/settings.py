"""Sizes of the study: which policies and batches are timed, and how often."""

import dataclasses

from kondo_lab.evidence.study import Size

RATE = 0.03
NUM_PIXELS, NUM_DIGITS = 784, 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class BanditShape:
    """The MNIST bandit: 784 pixels, two hidden layers of `width`, 10 actions."""

    width: int
    batch: int

    @property
    def name(self) -> str:
        """As parts and tables call it."""
        return f"mnist-w{self.width}-b{self.batch}"

    @property
    def rows(self) -> int:
        """Rows of a batch."""
        return self.batch

    @property
    def gigaflops(self) -> float:
        """Of a dense forward and backward, about: 6 per weight and row."""
        weights = NUM_PIXELS * self.width + self.width**2 + self.width * NUM_DIGITS
        return 6e-9 * weights * self.rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReversalShape:
    """Token reversal: a transformer of `num_layers` that answers each prompt several times."""

    length: int
    width: int
    num_layers: int
    num_heads: int
    num_prompts: int
    num_answers: int
    num_tokens: int = 2

    @property
    def name(self) -> str:
        """As parts and tables call it."""
        return f"reversal-h{self.length}-w{self.width}-l{self.num_layers}-b{self.rows}"

    @property
    def rows(self) -> int:
        """Rows of a batch: one per answer."""
        return self.num_prompts * self.num_answers

    @property
    def gigaflops(self) -> float:
        """Of a dense forward and backward, about: 6 per weight and token read."""
        weights = 12 * self.width**2 * self.num_layers
        return 6e-9 * weights * self.rows * (2 * self.length - 1)


Shape = BanditShape | ReversalShape


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """All that can change the results."""

    rounds: int
    """How often everything is timed; rounds take the place of seeds."""
    bandits: tuple[BanditShape, ...]
    reversals: tuple[ReversalShape, ...]
    rate: float = RATE
    learning_rate: float = 1e-6
    """Of Adam, which takes as long at any: small, so that the policy stays as it was drawn."""
    max_cpu_gigaflops: float = 100.0
    """Of a dense step: what is larger is left out on a CPU, where it takes seconds."""

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """All workloads."""
        return (*self.bandits, *self.reversals)


PAPER_SHAPE = ReversalShape(
    length=10, width=64, num_layers=2, num_heads=2, num_prompts=10, num_answers=10
)
REVERSALS = (
    PAPER_SHAPE,
    dataclasses.replace(PAPER_SHAPE, num_prompts=100),
    ReversalShape(length=30, width=256, num_layers=4, num_heads=4, num_prompts=4, num_answers=8),
    ReversalShape(length=30, width=256, num_layers=4, num_heads=4, num_prompts=32, num_answers=8),
    ReversalShape(length=50, width=512, num_layers=8, num_heads=8, num_prompts=64, num_answers=8),
)


def settings(size: Size, seeds: int | None) -> Settings:
    """Return the settings of a size; `seeds` is the number of rounds."""
    if size == "small":
        return Settings(
            rounds=seeds or 5,
            bandits=tuple(BanditShape(width=w, batch=b) for w, b in ((100, 100), (256, 1000))),
            reversals=(PAPER_SHAPE,),
        )
    return Settings(
        rounds=seeds or 20,
        bandits=tuple(
            BanditShape(width=width, batch=batch)
            for width in (100, 512, 2048, 8192)
            for batch in (100, 1000, 10_000)
        ),
        reversals=REVERSALS,
    )
