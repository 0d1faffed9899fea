"""Figures as the page embeds them: WebP images that together fit a budget of bytes."""

import base64
import dataclasses
import io
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from kondo.run_files import DamagedFileError, read_bytes

BUDGET = 1_500_000
"""Bytes of all images of a page, before base64 makes them a third larger."""
LARGEST = 120_000
"""Bytes of one image."""
LEAD_WEIGHT = 2
"""The share of the first figure of a study; every other figure has a share of 1."""
WIDE = 2.6
"""Width over height from which a figure takes the whole width of the page."""
LARGE = 1000
"""Pixels of width from which a figure has panels side by side."""
# From sharp to small: (pixels of width, WebP quality). The page shows at most 1,100 pixels.
STEPS = ((1600, 80), (1200, 60), (1100, 45), (1000, 35), (900, 30), (800, 25), (700, 15))


# What Pillow raises for a damaged file.
_NO_IMAGE = (OSError, SyntaxError, ValueError, EOFError, IndexError, struct.error, zlib.error)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Picture:
    """A figure, ready to be embedded."""

    source: str
    """A data URL."""
    width: int
    height: int
    drawn: int
    """Pixels of width of the figure's file."""

    @property
    def wide(self) -> bool:
        """Whether it takes the whole width of the page."""
        return self.width > WIDE * self.height

    @property
    def large(self) -> bool:
        """Whether its text would be too small on a phone's screen."""
        return self.wide or self.drawn >= LARGE


def encode(figures: Sequence[tuple[Path, bool]], budget: int = BUDGET) -> dict[Path, Picture]:
    """Return each figure as a picture; all together take at most about `budget` bytes.

    Each takes the sharpest step that fits its share of what is left, so that a page of one study
    has sharp figures and a page of thirty stays small. Equal files give equal pictures.

    Args:
        figures: path and whether it is the first figure of its study.
    """
    weights = [LEAD_WEIGHT if lead else 1 for _, lead in figures]
    left, step, made = budget, 0, {}
    for place, (path, _) in enumerate(figures):
        share = left * weights[place] / sum(weights[place:])
        # Figures of a page have similar shares: the search starts near where the last one ended.
        content, size, drawn, step = _encode(path, min(LARGEST, share), start=max(0, step - 1))
        left -= len(content)
        made[path] = Picture(
            source=f"data:image/webp;base64,{base64.b64encode(content).decode()}",
            width=size[0],
            height=size[1],
            drawn=drawn,
        )
    return made


def _opened(path: Path) -> Image.Image:
    """Return a figure on white: transparent ones are drawn for a white page."""
    content = io.BytesIO(read_bytes(path))  # read here: errors below are of the content alone
    try:
        with Image.open(content, formats=["PNG"]) as opened:
            rgba = opened.convert("RGBA")
    except (*_NO_IMAGE, Image.DecompressionBombError) as error:
        raise DamagedFileError(
            f"{path} is damaged ({error}). Delete it, then draw it again with `kondo plot STUDY "
            f"--from {path.parent}`."
        ) from error
    whole = Image.new("RGB", rgba.size, "white")
    whole.paste(rgba, mask=rgba.getchannel("A"))
    return whole


def _encode(path: Path, most: float, *, start: int) -> tuple[bytes, tuple[int, int], int, int]:
    """Return a WebP image of at most `most` bytes or the smallest; its size, width drawn, step."""
    whole = _opened(path)
    step = start
    while True:
        widest, quality = STEPS[step]
        width = min(widest, whole.width)
        size = (width, max(1, round(whole.height * width / whole.width)))
        small = whole if size == whole.size else whole.resize(size, Image.Resampling.LANCZOS)
        buffer = io.BytesIO()
        small.save(buffer, "WEBP", quality=quality, method=4)
        content = buffer.getvalue()
        if len(content) <= most or step == len(STEPS) - 1:
            return content, size, whole.width, step
        # No single step halves an image.
        step = min(step + (2 if len(content) > 2 * most else 1), len(STEPS) - 1)
