"""Whether an optimizer's step may be taken in bundles of parameters, and how large they are."""

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
BUNDLES = 32  # on an accelerator, at most: each costs launches, which the device would wait for
BUNDLE_BYTES_CPU = 8 << 20  # what stays in its cache is copied for little
# Of the classes known to step by parameter, the ones that take norms or products of a whole parameter: on shards that
# takes all ranks.
_REDUCE_WITHIN_A_PARAMETER = ("Adafactor", "Muon", "StableAdamW")


def bundle_bytes_for(optimizer: Optimizer) -> int:
    """Weights, gradients and states that are copied at a time, where the user names no bytes."""
    parameters = [slot.parameter for slot in slots(optimizer)]
    if all(parameter.device.type == "cpu" for parameter in parameters):
        return BUNDLE_BYTES_CPU
    copied_bytes = 3 * sum(local_part(parameter).nbytes for parameter in parameters)  # with two moments
    return max(BUNDLE_BYTES, copied_bytes // BUNDLES)


def steps_by_parameter(optimizer: Optimizer) -> bool:
    """Whether parameters may be stepped one after the other, with the same result."""
    if combines_over_the_model(optimizer) or communicates(optimizer) or uses_closure_its_own_way(optimizer):
        return False
    compensation = compensation_of(optimizer)
    if home_of(optimizer) is not None or (
        compensation is not None and not compensation.engine.under_identity
    ):
        return True  # so they are anyway
    return is_known_by_parameter(optimizer)


def may_slice(optimizer: Optimizer) -> bool:
    """Whether a parameter may be stepped in slices: its states are at hand, and its class's step is what steps it."""
    compensation = compensation_of(optimizer)
    own_step = has_own_step(optimizer) if compensation is None else not compensation.engine.may_fuse
    return is_elementwise(optimizer) and not own_step and home_of(optimizer) is None


def communicates(optimizer: Optimizer) -> bool:
    """Whether a step is not known to do without other ranks, which a repeated one would leave behind."""
    if not any(hasattr(slot.parameter, "to_local") for slot in slots(optimizer)):
        return False
    return not is_known_class(optimizer) or type(optimizer).__name__ in _REDUCE_WITHIN_A_PARAMETER
