"""The attributes that users and libraries set on tensors (`parameter.importance = ...`): state like a module's."""

from typing import Any

from torch import Tensor

from lightning_memkit.utilities.tensors import is_wrapper


class NamesOfTorch:
    """Contains the names of a tensor's attributes that are torch's own, and no state of the step.

    These are the marks that `torch.compile` leaves on tensors, and what a tensor subclass is made of.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._inner: Any = None
        if tensor.__dict__ and is_wrapper(tensor):
            of_parts: Any = tensor
            self._inner = of_parts.__tensor_flatten__()[0]

    def __contains__(self, name: object) -> bool:
        name = str(name)
        return "_dynamo_" in name or (
            self._inner is not None and (name.startswith("_") or name in self._inner)
        )


def attributes_of(tensor: Tensor) -> dict[str, Any]:
    """The attributes of a tensor by name, without torch's own."""
    if not tensor.__dict__:
        return {}
    passed_over = NamesOfTorch(tensor)
    return {name: value for name, value in tensor.__dict__.items() if name not in passed_over}
