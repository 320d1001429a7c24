"""How far outputs that should be the same are apart, and how far rounding may bring them."""

import torch
from torch import Tensor

# Of an output's largest value: kernels may add up in another order where there are fewer rows.
ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-4}
_COARSE = 4e-2  # of floats of 16 bits and fewer
MORE_BITS = {torch.float64: 1e-13, torch.float32: 2e-6}  # of runs that differ in rounding only


def equal(one: Tensor, other: Tensor) -> bool:
    """Whether all values are the same."""
    return difference(one, other) == 0


def difference(one: Tensor, other: Tensor) -> float:
    """The largest difference; infinite where one is not a number and the other is."""
    if torch.equal(one, other):
        return 0.0
    if not (one.is_floating_point() or one.is_complex()):
        return float("inf")
    off = (one.double() - other.double()).abs() if one.is_floating_point() else (one - other).abs()
    alike = one.isnan() & other.isnan() | (one == other)
    return float(
        torch.where(alike, torch.zeros_like(off), off).nan_to_num(nan=float("inf"), posinf=float("inf")).max()
    )


def allowed(one: Tensor, relative: dict[torch.dtype, float]) -> float:
    """The difference that rounding may make, by an output's largest value; 0 of whole numbers."""
    if not one.numel() or not one.is_floating_point():
        return 0.0
    largest = float(one.detach().abs().double().nan_to_num(0.0, 0.0, 0.0).max())
    return largest * relative.get(one.dtype, _COARSE)
