"""Which optimizer states may be stored in bfloat16, and how they must be rounded to it.

A running mean with decay d moves by (1 - d) of a difference. Round-to-nearest in bfloat16 loses moves below
0.2-0.4 % of the value, so a mean with d = 0.999 freezes at up to 100 times its true value, while one with d =
0.9 follows it to within 4 %. Hence second moments are always rounded stochastically, and first moments above
d = 0.9. A state with an unknown name stays in float32, whatever that costs: it may be a copy of the weights
or a step size.
"""

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_memkit.utilities.tensors import is_wrapper

Storage = Literal["keep", "nearest", "stochastic"]

FIRST_MOMENTS = frozenset({"exp_avg", "momentum_buffer", "grad_avg"})
SECOND_MOMENTS = frozenset(
    {
        "exp_avg_sq",  # Adam and most of its descendants
        "square_avg",  # RMSprop, Adadelta
        "acc_delta",  # Adadelta
        "sum",  # Adagrad
        "exp_inf",  # Adamax
        "variance",  # Adafactor, for vectors
        "state1",  # bitsandbytes: the first moment, but the second in its RMSprop and Adagrad
        "state2",  # bitsandbytes
    }
)
# Entry of a parameter's state: if True, its states are float32, whatever their names.
KEEP_FLOAT32 = "keep_float32"
RUNNING_MAXIMA = frozenset({"max_exp_avg_sq"})  # noise would only ever push a maximum up
NEAREST_UP_TO_DECAY = 0.9


def storage_of(
    name: str, value: Any, state: Mapping[str, Any], group: Mapping[str, Any], like: Tensor
) -> Storage:
    """How ``states="compact"`` stores the state ``name`` of a parameter shaped ``like``."""
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.dtype == torch.float64:
        return "keep"
    if value.shape != like.shape or value.dim() == 0 or state.get(KEEP_FLOAT32):
        return "keep"
    if is_wrapper(value) and not hasattr(value, "to_local"):
        return "keep"  # torchao's states are quantized already
    if name in SECOND_MOMENTS:
        return "stochastic"
    if name in RUNNING_MAXIMA:
        return "nearest"
    if name in FIRST_MOMENTS:
        return "nearest" if _decay(state, group) <= NEAREST_UP_TO_DECAY else "stochastic"
    return "keep"


def _decay(state: Mapping[str, Any], group: Mapping[str, Any]) -> float:
    """The decay of the first moment; 1 if unknown, which selects the safe rounding."""
    betas = group.get("betas")
    if betas is not None:
        # Lion has no second moment, and its momentum decays by the slower of the two betas.
        return float(betas[0] if SECOND_MOMENTS & state.keys() else max(betas[:2]))
    return float(group.get("momentum", group.get("beta1", 1.0)) or 0.0)
