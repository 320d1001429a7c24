"""Kahan's running compensation of a bfloat16 weight, in bfloat16: 2 bytes a parameter more, about 16 bits kept.

``weight + compensation`` is the value that is trained; the compensation is what rounding the weight to
bfloat16 left out (W. Kahan, "Further remarks on reducing truncation errors", CACM 1965; for bfloat16 training
Zamirai et al., "Revisiting BFloat16 Training", arXiv:2010.06192). Unlike in their kernels, the whole step
happens in float32 on the sum, weight decay included.
"""

from torch import Tensor

from lightning_memkit.optim.blocks import blocks, surely_finite

COMPENSATION = "compensation"  # the name under which an optimizer's state holds it


def kahan_split_(master: Tensor, weight: Tensor, compensation: Tensor) -> None:
    """Write float32 ``master`` as the bfloat16 ``weight`` nearest to it and the bfloat16 rest."""
    for master_block, weight_block, rest_block in blocks(master, weight, compensation):
        weight_block.copy_(master_block)
        rest = master_block.sub(weight_block)
        if not surely_finite(rest):
            # Infinity and NaN leave no rest: inf - inf would turn a value that rounds to infinity into NaN.
            rest.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        rest_block.copy_(rest)


def kahan_join_(weight: Tensor, compensation: Tensor, out: Tensor) -> None:
    """Write the float32 sum of weight and compensation into ``out``; the sum of the two is exact in float32."""
    for weight_block, rest_block, out_block in blocks(weight, compensation, out):
        out_block.copy_(weight_block).add_(rest_block)
