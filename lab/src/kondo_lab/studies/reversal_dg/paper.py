"""Numbers read off the DG paper's figures, about 3% of their value uncertain."""

FIG_8: dict[str, dict[float, float]] = {
    "DG": {250: 0.23, 400: 0.069, 600: 0.0071, 700: 0.0037, 800: 0.0025, 1000: 3.4e-4},
    "PG": {
        100: 0.38,
        200: 0.32,
        250: 0.29,
        400: 0.20,
        500: 0.13,
        600: 0.085,
        700: 0.063,
        800: 0.052,
        1000: 0.035,
    },
    "PPO": {1000: 0.034},
    "PMPO": {200: 0.33, 500: 0.21, 700: 0.14, 900: 0.10, 1000: 0.085},
}
"""Sequence error by step."""

FIG_9A: dict[str, dict[float, float]] = {
    "PG": {50: 0.20},
    "PPO": {50: 0.22},
    "PMPO": {50: 0.13},
    "DG": {50: 0.01},
}
"""Sequence error at 10k steps by length H, M = 2."""

FIG_9B: dict[str, dict[float, float]] = {
    "PMPO": {10: 0.02, 15: 0.09, 20: 0.17, 30: 0.36, 50: 0.71},
    "PG": {20: 0.02, 30: 0.14, 50: 0.43},
    "DG": {30: 0.017, 50: 0.07},
}
"""Sequence error at 10k steps by vocabulary M, H = 10."""
