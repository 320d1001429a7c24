"""Whether an optimizer may be stepped bucket by bucket, and how large the buckets are."""

from torch.optim import Optimizer

from lightning_memkit.optim.blocks import local_part
from lightning_memkit.optim.compensation import compensation_of
from lightning_memkit.optim.methods import (
    combines_over_the_model,
    has_own_step,
    is_known_by_parameter,
    is_known_class,
    uses_closure_its_own_way,
)
from lightning_memkit.optim.pieces import slots
from lightning_memkit.optim.slices import is_elementwise
from lightning_memkit.optim.state_home import home_of

BUNDLE_BYTES = 64 << 20
BUNDLES = 32  # at most this many on an accelerator: each one launches kernels of its own
BUNDLE_BYTES_CPU = 8 << 20  # small enough to stay in the CPU's cache, so that copies are cheap
# Classes known to step each parameter by itself that still take norms or products over a whole parameter: on
# sharded parameters these need all ranks.
_REDUCE_WITHIN_A_PARAMETER = ("Adafactor", "Muon", "StableAdamW")


def bundle_bytes_for(optimizer: Optimizer) -> int:
    """Bytes of weights, gradients and states copied at a time, where the user gives none."""
    parameters = [slot.parameter for slot in slots(optimizer)]
    if all(parameter.device.type == "cpu" for parameter in parameters):
        return BUNDLE_BYTES_CPU
    # Weight, gradient and two moments, roughly.
    copied_bytes = 3 * sum(local_part(parameter).nbytes for parameter in parameters)
    return max(BUNDLE_BYTES, copied_bytes // BUNDLES)


def steps_by_parameter(optimizer: Optimizer) -> bool:
    """Whether stepping the parameters one after the other gives the same result as one step over all."""
    if combines_over_the_model(optimizer) or communicates(optimizer) or uses_closure_its_own_way(optimizer):
        return False
    compensation = compensation_of(optimizer)
    if home_of(optimizer) is not None or (
        compensation is not None and not compensation.engine.under_identity
    ):
        return True  # these are stepped parameter by parameter anyway
    return is_known_by_parameter(optimizer)


def may_slice(optimizer: Optimizer) -> bool:
    """Whether a parameter may be stepped in slices: its states are on its device and its class's own step is used."""
    compensation = compensation_of(optimizer)
    own_step = has_own_step(optimizer) if compensation is None else not compensation.engine.may_fuse
    return is_elementwise(optimizer) and not own_step and home_of(optimizer) is None


def communicates(optimizer: Optimizer) -> bool:
    """Whether a step may communicate with other ranks, so that retrying it on one rank alone would hang."""
    if not any(hasattr(slot.parameter, "to_local") for slot in slots(optimizer)):
        return False
    return not is_known_class(optimizer) or type(optimizer).__name__ in _REDUCE_WITHIN_A_PARAMETER
