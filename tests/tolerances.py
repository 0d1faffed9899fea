"""The one tolerance table: how far a result may stand from its reference, by dtype.

No test writes a literal rtol or atol; it calls `assert_close`, or reads this table.
"""

import torch
from torch import Tensor

TOLERANCES: dict[torch.dtype, dict[str, float]] = {
    torch.float64: {"rtol": 1e-12, "atol": 1e-12},
    torch.float32: {"rtol": 1e-5, "atol": 1e-6},
    torch.float16: {"rtol": 2e-3, "atol": 1e-3},
    torch.bfloat16: {"rtol": 1.6e-2, "atol": 1e-2},
}


def assert_close(
    actual: Tensor | float, expected: Tensor | float, dtype: torch.dtype | None = None
) -> None:
    """Fail unless `actual` has the shape and, within the table, the values of `expected`.

    NaN equals NaN and inf equals inf. Values, not dtypes, are compared; a test of the dtype
    asserts it. The tolerance is that of `dtype`, by default of the less precise of the two
    tensors: give it where the computation was less precise than its result. A plain number is
    exact and stands for a float64.
    """
    actual, expected = _tensor(actual), _tensor(expected)
    if dtype is None:
        dtype = max((actual.dtype, expected.dtype), key=lambda d: TOLERANCES[d]["rtol"])
    torch.testing.assert_close(
        actual.detach().cpu().double(),
        expected.detach().cpu().double(),
        equal_nan=True,
        **TOLERANCES[dtype],
    )


def _tensor(value: Tensor | float) -> Tensor:
    """Return a tensor of a dtype in the table: numbers, counts and flags are exact."""
    if not isinstance(value, Tensor):
        value = torch.tensor(value, dtype=torch.float64)
    return value if value.dtype in TOLERANCES else value.double()
