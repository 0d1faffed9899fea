"""Numbers read off both papers' figures of token reversal, about 3% of their value uncertain."""

DG_FIG_8: dict[str, dict[float, float]] = {
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

DG_FIG_9A: dict[str, dict[float, float]] = {
    "PG": {50: 0.20},
    "PPO": {50: 0.22},
    "PMPO": {50: 0.13},
    "DG": {50: 0.01},
}
"""Sequence error at 10k steps by length H, M = 2."""

DG_FIG_9B: dict[str, dict[float, float]] = {
    "PMPO": {10: 0.02, 15: 0.09, 20: 0.17, 30: 0.36, 50: 0.71},
    "PG": {20: 0.02, 30: 0.14, 50: 0.43},
    "DG": {30: 0.017, 50: 0.07},
}
"""Sequence error at 10k steps by vocabulary M, H = 10."""

GATE_FIG_8: dict[str, dict[float, float]] = {
    "DG": {
        107: 0.746,
        198: 0.618,
        290: 0.43,
        381: 0.31,
        473: 0.20,
        564: 0.109,
        655: 0.055,
        747: 0.027,
        838: 0.0145,
        930: 0.0073,
        1021: 0.0044,
        1200: 0.0029,
        1387: 0.0020,
        4000: 1.5e-4,
        10000: 2e-5,
    },
    "DG-K 3%": {504: 0.15, 1000: 0.0083, 1400: 0.0038, 2000: 0.0022, 5000: 7e-4, 10000: 9e-4},
    "DG-K price 0": {200: 0.59, 504: 0.21, 1000: 0.019, 1400: 0.0046, 10000: 0.003},
    "PPO": {168: 0.72, 534: 0.49, 900: 0.40, 2000: 0.23, 10000: 0.212},
    "PG": {168: 0.72, 534: 0.49, 900: 0.40, 2000: 0.23, 10000: 0.212},
    "PMPO": {534: 0.56, 2400: 0.30, 9000: 0.25},
}
"""Sequence error by step; PG and PPO share one line in the figure."""

GATE_FIG_8_BACKWARD = {"DG-K 3%": 30_000.0, "DG-K price 0": 65_500.0}
"""Backward passes paid at 1M forward passes."""

GATE_FIG_10: dict[str, dict[float, float]] = {
    "DG-K 3%": {250e3: 15.2, 500e3: 21.2, 1e6: 29.2},
    "DG-K price 0": {250e3: 14.7, 500e3: 19.9, 1e6: 28.3},
    "DG": {250e3: 14.8, 500e3: 20.5, 1e6: 26.5},
    "PMPO": {250e3: 9.7, 500e3: 14.7, 1e6: 18.3},
    "PG": {500e3: 13.3, 1e6: 16.9},
    "PPO": {250e3: 9.2, 500e3: 13.3, 1e6: 16.7},
}
"""Longest length with reward above 0.75, by forward passes."""
