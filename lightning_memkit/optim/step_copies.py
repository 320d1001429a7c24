"""Copies what an optimizer's step changes and restores it into the same tensors, bit for bit.

A step may write into weights, gradients and states, replace states, and create new ones. The copies keep each
tensor object and, beside it, its values, so that after a roll-back every reference to a tensor is valid.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_memkit.optim.group_scalars import group_scalars, restore_group_scalars
from lightning_memkit.optim.own_attributes import (
    PLAIN,
    contents,
    copied_contents,
    is_own,
    own_attributes,
    own_class_attributes,
    set_contents,
)
from lightning_memkit.optim.pages import pages_used_again
from lightning_memkit.optim.pieces import Slot, slots
from lightning_memkit.utilities.class_attributes import restore_class_attributes
from lightning_memkit.utilities.rewindable import make_rewindable
from lightning_memkit.utilities.tensors import is_wrapper

_PLAIN_TENSORS = (Tensor, Parameter)
# The C library often returns memory of a few MiB without page faults, but not in every process.
_WORTH_KEEPING_BYTES = 1 << 20


class StepCopies:
    """Copies of the weights, gradients and states of some parameters: as many bytes as these have.

    Args:
        optimizer: the optimizer of the step.
        shown: the parameters.
        on_host: keep the copies in host memory.
        room: memory of earlier copies that is reused.
        reads_gradient: whether a parameter's step only reads its gradient, which is then not copied.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        shown: Iterable[Slot],
        *,
        on_host: bool = False,
        room: "Room | None" = None,
        reads_gradient: Callable[[Slot], bool] = lambda _: False,
    ) -> None:
        self._optimizer = optimizer
        self._reads_gradient = reads_gradient
        self._tensors: list[Tensor] = []
        self._containers: list[tuple[Any, Any]] = []
        self._seen: set[int] = set()  # what an optimizer refers to in several places is copied once
        self._weights: list[tuple[Parameter, Tensor, Tensor | None]] = []
        self._states: list[tuple[Any, Any]] = []  # a parameter and its state; None if it has none
        self._keep_all(shown)
        self._values = _CopiedValues(self._tensors, on_host, Room() if room is None else room)

    def restore(self) -> None:
        """Restore everything; allocates nothing if the copies are on the tensors' device."""
        with pages_used_again(self._optimizer):
            for key, state in self._states:
                if state is not None:
                    self._optimizer.state[key] = state
                elif key in self._optimizer.state:
                    del self._optimizer.state[key]
            for container, before in self._containers:
                set_contents(container, before)
        for parameter, data, gradient in self._weights:
            if parameter.grad is not gradient:
                parameter.grad = gradient
            if not is_wrapper(parameter) and parameter.data_ptr() != data.data_ptr():
                parameter.data = data
        self._values.write_back()

    def _keep_all(self, shown: Iterable[Slot]) -> None:
        shown = list(shown)
        self._seen |= {id(slot.parameter) for slot in shown}
        for slot in shown:
            self._keep_parameter(slot)

    def _keep_parameter(self, slot: Slot) -> None:
        parameter = slot.parameter
        data = parameter.detach()  # the current memory: a step may assign another one to the parameter
        self._weights.append((parameter, data, parameter.grad))
        self._keep(data)
        if parameter.grad is not None and not self._reads_gradient(slot):
            self._keep(parameter.grad)
        self._keep_state(parameter)

    def _keep_state(self, key: Any) -> None:
        state = self._optimizer.state[key] if key in self._optimizer.state else None
        self._states.append((key, state))
        self._keep(state)

    def _keep(self, value: Any) -> None:
        if (
            type(value) in _PLAIN_TENSORS
        ):  # the common case first: a step of many small parameters must be fast here
            self._tensors.append(value)
        elif isinstance(value, Tensor):
            self._tensors.extend(_parts(value))
        elif type(value) is dict and id(value) not in self._seen:  # a parameter's state
            self._seen.add(id(value))
            self._containers.append((value, value.copy()))
            for item in value.values():
                self._keep(item)
        elif not isinstance(value, PLAIN):
            self._keep_all_within(value)

    def _keep_all_within(self, value: Any) -> None:
        """Copy what an object or a container of the optimizer's own holds, at any depth."""
        for _, item in contents(value, "", self._seen):
            if not isinstance(item, Tensor):
                make_rewindable(item)
                self._containers.append((item, copied_contents(item)))
            else:
                self._tensors.extend(_parts(item))


class OwnAttributeCopies(StepCopies):
    """Copies of an optimizer's own attributes and all they hold; may be restored any number of times.

    These are buffers, counters, other optimizers, and what a step notes on parameters (`p.momentum = ...`).

    Args:
        optimizer: the optimizer.
        on_host: keep the copies in host memory.
        shown: parameters whose weights, gradients and states are copied, too.
    """

    def __init__(self, optimizer: Optimizer, *, on_host: bool, shown: Iterable[Slot] = ()) -> None:
        self._own, self._classes = own_attributes(optimizer), own_class_attributes(optimizer)
        super().__init__(optimizer, shown, on_host=on_host)

    def restore(self) -> None:
        """Restore the attributes, and the parameters that were shown."""
        super().restore()
        for kind, before in self._classes:
            restore_class_attributes(kind, before)
        attributes = vars(self._optimizer)
        for name in [name for name in attributes if is_own(name) and name not in self._own]:
            del attributes[name]
        attributes.update(self._own)

    def _keep_all(self, shown: Iterable[Slot]) -> None:
        super()._keep_all(shown)
        # Weights, states and groups, which an inner optimizer may share, are rolled back separately.
        optimizer = self._optimizer
        groups = [*optimizer.param_groups, *(group["params"] for group in optimizer.param_groups)]
        parameters = [slot.parameter for slot in slots(optimizer)]
        self._seen.update(map(id, (optimizer.state, optimizer.param_groups, *groups, *parameters)))
        of_classes = [value for _, attributes in self._classes for value in attributes.values()]
        for value in (*map(vars, parameters), *self._own.values(), *of_classes):
            self._keep_all_within(value)


class WholeStepCopies(OwnAttributeCopies):
    """Copies, in host memory, of everything that a step of any optimizer may change.

    Besides those of all parameters and of the optimizer's own attributes: group scalars, states of no parameter.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._scalars = group_scalars(optimizer)
        super().__init__(optimizer, on_host=True, shown=slots(optimizer))

    def restore(self) -> None:
        """Restore everything."""
        kept = {key for key, _ in self._states}
        with pages_used_again(self._optimizer):
            for key in [key for key in self._optimizer.state if key not in kept]:
                del self._optimizer.state[key]
        super().restore()
        restore_group_scalars(self._optimizer, self._scalars)

    def _keep_all(self, shown: Iterable[Slot]) -> None:
        super()._keep_all(shown)
        parameters = {key for key, _ in self._states}
        for key in self._optimizer.state:
            if key not in parameters:
                self._keep_state(key)


class _CopiedValues:
    """Copies of tensors' values; joined to one tensor for each device and dtype, to copy small ones in one call."""

    def __init__(self, tensors: list[Tensor], on_host: bool, room: "Room") -> None:
        self._apart: list[tuple[Tensor, Tensor]] = []
        self._joined: list[tuple[list[Tensor], Tensor]] = []
        alike: defaultdict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
        for tensor in tensors:
            if tensor.layout != torch.strided:
                self._apart.append((tensor, tensor.clone()))
            elif on_host and tensor.device.type != "cpu":
                self._apart.append((tensor, tensor.to("cpu", copy=True)))
            else:
                alike[tensor.device, tensor.dtype].append(tensor)
        for group in alike.values():
            if len(group) == 1:  # torch would make the joined tensor a view of it
                self._apart.append((group[0], group[0].clone()))
            else:
                self._joined.append((group, room.joined(group)))

    def write_back(self) -> None:
        with torch.no_grad():  # an optimizer's own attributes may hold parameters that it does not step
            for tensor, values in self._apart:
                tensor.copy_(values)
            for tensors, values in self._joined:
                torch._foreach_copy_(tensors, _unflatten_dense_tensors(values, tensors))


class Room:
    """Memory that the copies of successive buckets use in turn.

    On a CPU, fresh memory costs a page fault every 4 KiB, more than the copy. On other devices torch's
    caching allocator does the same job.
    """

    def __init__(self) -> None:
        self._memory: dict[torch.dtype, Tensor] = {}

    def joined(self, tensors: list[Tensor]) -> Tensor:
        """The values of tensors of one dtype and device, concatenated."""
        count = sum(tensor.numel() for tensor in tensors)
        first = tensors[0]
        if first.device.type != "cpu" or count * first.element_size() < _WORTH_KEEPING_BYTES:
            return _flatten_dense_tensors(tensors)
        memory = self._memory.get(first.dtype)
        if memory is None or memory.numel() < count:
            self._memory.pop(first.dtype, None)
            del memory  # free the old memory before allocating more
            memory = self._memory[first.dtype] = torch.empty(count, dtype=first.dtype)
        return torch.cat([tensor.reshape(-1) for tensor in tensors], out=memory[:count])


def bytes_to_copy(optimizer: Optimizer, parameter: Parameter) -> int:
    """Bytes of a parameter, its gradient and its states."""
    state = optimizer.state[parameter] if parameter in optimizer.state else {}
    held = [value for value in (parameter.grad, *state.values()) if isinstance(value, Tensor)]
    parts = [part for value in held for part in _parts(value)]
    return parameter.nbytes + sum(
        part.nbytes if part.layout == torch.strided else part._values().nbytes for part in parts
    )


def _parts(tensor: Tensor) -> Iterator[Tensor]:
    """The plain tensors inside a tensor: the shard of a DTensor, the codes and scales of torchao's states."""
    if not is_wrapper(tensor):
        yield tensor
        return
    names, _ = tensor.__tensor_flatten__()  # pyright: ignore[reportAttributeAccessIssue]
    for part in (getattr(tensor, name) for name in names):
        if isinstance(part, Tensor):
            yield from _parts(part)
