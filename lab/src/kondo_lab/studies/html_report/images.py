"""Figures as the page embeds them: WebP images that together fit a budget of bytes."""

import base64
import dataclasses
import io
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

BUDGET = 1_500_000
"""Bytes of all images of a page, before base64 makes them a third larger."""
LARGEST = 120_000
"""Bytes of one image."""
LEAD_WEIGHT = 2
"""The share of the first figure of a study; every other figure has a share of 1."""
WIDE = 2.6
"""Width over height from which a figure takes the whole width of the page."""
# From sharp to small: (pixels of width, WebP quality). The page shows at most 1,100 pixels.
STEPS = ((1600, 80), (1200, 60), (1100, 45), (1000, 35), (900, 30), (800, 25), (700, 15))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Picture:
    """A figure, ready to be embedded."""

    source: str
    """A data URL."""
    width: int
    height: int

    @property
    def wide(self) -> bool:
        """Whether it needs the whole width of the page to be read."""
        return self.width > WIDE * self.height


def encode(figures: Sequence[tuple[Path, bool]], budget: int = BUDGET) -> dict[Path, Picture]:
    """Return each figure as a picture; all together take at most about `budget` bytes.

    Each takes the sharpest step that fits its share of what is left, so that a page of one study
    has sharp figures and a page of thirty stays small. Equal files give equal pictures.

    Args:
        figures: path and whether it is the first figure of its study.
    """
    weights = [LEAD_WEIGHT if lead else 1 for _, lead in figures]
    left, made = budget, {}
    for place, (path, _) in enumerate(figures):
        share = left * weights[place] / sum(weights[place:])
        content, size = _encode(path, min(LARGEST, share))
        left -= len(content)
        made[path] = Picture(
            source=f"data:image/webp;base64,{base64.b64encode(content).decode()}",
            width=size[0],
            height=size[1],
        )
    return made


def _encode(path: Path, most: float) -> tuple[bytes, tuple[int, int]]:
    """Return a WebP image of at most `most` bytes, or the smallest there is, and its size."""
    with Image.open(path) as opened:
        # Transparent figures are drawn for a white page.
        whole = Image.new("RGB", opened.size, "white")
        rgba = opened.convert("RGBA")
        whole.paste(rgba, mask=rgba.getchannel("A"))
    tried, content = (0, 0), b""
    for widest, quality in STEPS:
        width = min(widest, whole.width)
        if (width, quality) == tried:
            continue
        tried = (width, quality)
        size = (width, max(1, round(whole.height * width / whole.width)))
        small = whole if size == whole.size else whole.resize(size, Image.Resampling.LANCZOS)
        buffer = io.BytesIO()
        small.save(buffer, "WEBP", quality=quality, method=4)
        content = buffer.getvalue()
        if len(content) <= most:
            break
    return content, size
