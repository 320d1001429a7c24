"""Notes which gradients of the step before a training step reads; a micro-batch would read those of the one before."""

from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_memkit.micro_batching.changes.step_changes import StepChange
from lightning_memkit.micro_batching.run import Step

_GRAD: Any = Tensor.grad
_READS = _GRAD.__get__


class ReadGradients(TorchFunctionMode):
    """A context that notes each parameter of the step's optimizer whose `.grad` is read in it.

    Args:
        step: the current step.
    """

    def __init__(self, step: Step) -> None:
        super().__init__()
        stepped = {id(parameter) for group in step.optimizer.param_groups for parameter in group["params"]}
        named = step.run.module.named_parameters()
        self._names = {id(parameter): name for name, parameter in named if id(parameter) in stepped}
        self._read: dict[str, None] = {}

    @property
    def changes(self) -> tuple[StepChange, ...]:
        """The gradients that were read."""
        return tuple(StepChange(kind="gradient", name=f"{name}.grad") for name in self._read)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note a read of a gradient; everything runs as it is."""
        if func == _READS and id(args[0]) in self._names:
            self._read[self._names[id(args[0])]] = None
        return func(*args, **(kwargs or {}))
