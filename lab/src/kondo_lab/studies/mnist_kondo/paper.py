"""Numbers read off the paper's figures, about 3% of their value uncertain."""

FORWARD = (20e3, 50e3, 100e3, 200e3, 300e3, 500e3, 700e3, 1e6)
"""Where Figure 1 was read."""


def _at(*values: float) -> dict[float, float]:
    return dict(zip(FORWARD, values, strict=True))


FIG_1 = {
    "PG": _at(0.269, 0.205, 0.154, 0.120, 0.102, 0.084, 0.060, 0.037),
    "DG": _at(0.182, 0.113, 0.078, 0.054, 0.042, 0.030, 0.022, 0.0163),
    "DG-K 3%": _at(0.573, 0.300, 0.160, 0.086, 0.060, 0.039, 0.030, 0.0236),
}
"""Online error by forward passes."""

FIG_3 = {
    "DG": (2.25,) * 9,
    "DG-K 3%": (1.41, 2.74, 3.98, 5.17, 6.30, 7.35, 8.36, 9.32, 10.21),
}
"""Speed-up over PG to 5% test error, by backward/forward cost ratio 0 .. 8."""

FIG_2_EVENTUALLY = 0.005
FIG_4_TOLERATED = {"delight noise": 0.5, "logit noise": 1.0}
"""Noise that DG bears, from the caption."""
FIG_5_COLLAPSE = 0.3
"""Weight above which the additive mix collapses, from the caption."""
