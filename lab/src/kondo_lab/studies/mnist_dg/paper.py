"""Numbers read off the DG paper's figures, about 3% of their value uncertain."""

FIG_2: dict[str, dict[float, float]] = {
    "PG, zero baseline": {
        100: 0.308,
        500: 0.194,
        2000: 0.133,
        3000: 0.117,
        5000: 0.103,
        7000: 0.0945,
        10000: 0.083,
    },
    "DG, zero baseline": {
        100: 0.311,
        200: 0.201,
        1000: 0.110,
        2000: 0.085,
        3000: 0.072,
        8000: 0.050,
        10000: 0.0448,
    },
    "cross-entropy": {
        1000: 0.065,
        2000: 0.042,
        3000: 0.030,
        5000: 0.018,
        7500: 0.0105,
        10000: 0.0068,
    },
}
"""Online error by step."""

FIG_2_STEPS = sorted({step for points in FIG_2.values() for step in points})

_SAMPLES = (1, 3, 10, 30, 100)


def _by_samples(*values: float) -> dict[int, float]:
    return dict(zip(_SAMPLES, values, strict=True))


FIG_3 = {
    "PG, zero baseline": _by_samples(0.0823, 0.0366, 0.0228, 0.0181, 0.0159),
    "DG, zero baseline": _by_samples(0.0399, 0.0210, 0.0157, 0.0146, 0.0141),
    "PG, constant baseline": _by_samples(0.0252, 0.0222, 0.0166, 0.0161, 0.0158),
    "DG, constant baseline": _by_samples(0.0176, 0.0150, 0.0138, 0.0135, 0.0134),
    "PG, expected baseline": _by_samples(0.0297, 0.0207, 0.0176, 0.0164, 0.0159),
    "DG, expected baseline": _by_samples(0.0161, 0.0139, 0.0131, 0.0129, 0.0127),
    "PG, oracle baseline": _by_samples(0.0593, 0.0297, 0.0203, 0.0166, 0.0160),
    "DG, oracle baseline": _by_samples(0.0222, 0.0157, 0.0129, 0.0121, 0.0117),
}
"""Online error at 10k steps by samples per image."""

EXACT_PG = 0.0158
"""The dotted line of Figure 3."""

_STEPS = (1000, 2500, 5000, 7500, 10000)


def _by_step(*values: float) -> dict[int, float]:
    return dict(zip(_STEPS, values, strict=True))


FIG_4A = {
    ("PG", 1): _by_step(0.42, 0.37, 0.31, 0.26, 0.23),
    ("PG", 100): _by_step(0.014, 0.020, 0.038, 0.069, 0.100),
    ("DG", 1): _by_step(0.22, 0.21, 0.196, 0.18, 0.17),
    ("DG", 100): _by_step(0.060, 0.063, 0.070, 0.078, 0.084),
}
"""1 - cosine to the exact PG gradient: (method, samples) -> by step."""

FIG_4B = {
    ("PG", 1): _by_step(0.72, 0.70, 0.64, 0.59, 0.55),
    ("PG", 100): _by_step(0.52, 0.53, 0.53, 0.52, 0.50),
    ("DG", 1): _by_step(0.42, 0.42, 0.41, 0.39, 0.36),
    ("DG", 100): _by_step(0.30, 0.32, 0.33, 0.31, 0.29),
}
"""1 - cosine to the cross-entropy gradient."""
