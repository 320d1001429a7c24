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
        self._seen: set[int] = set()
        self._weights_seen: set[int] = (
            set()
        )  # parameters that an optimizer also refers to elsewhere are copied once
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
        for slot in shown:
            self._keep_parameter(slot)

    def _keep_parameter(self, slot: Slot) -> None:
        parameter = slot.parameter
        data = parameter.detach()  # the current memory: a step may assign another one to the parameter
        self._weights.append((parameter, data, parameter.grad))
        self._weights_seen.add(id(parameter))
        self._keep(data)
        if parameter.grad is not None and not self._reads_gradient(slot):
            self._keep(parameter.grad)
        self._keep_state(parameter)

    def _keep_beside(self) -> None:
        """Keep what a step may note on parameters, as attributes of theirs (`p.momentum = ...`)."""
        for slot in slots(self._optimizer):
            attributes = vars(slot.parameter)
            self._containers.append((attributes, attributes.copy()))
            for value in attributes.values():
                self._keep(value)

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
            elif id(item) not in self._weights_seen:
                self._tensors.extend(_parts(item))


class WholeStepCopies(StepCopies):
    """Copies, in host memory, of everything that a step of any optimizer may change.

    Besides those of `StepCopies`: group scalars, states of no parameter, and the optimizer's own attributes
    with everything they hold: buffers, counters, other optimizers.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._scalars = group_scalars(optimizer)
        self._own, self._classes = own_attributes(optimizer), own_class_attributes(optimizer)
        super().__init__(optimizer, slots(optimizer), on_host=True)

    def restore(self) -> None:
        """Restore everything."""
        kept = {key for key, _ in self._states}
        with pages_used_again(self._optimizer):
            for key in [key for key in self._optimizer.state if key not in kept]:
                del self._optimizer.state[key]
        super().restore()
        restore_group_scalars(self._optimizer, self._scalars)
        restore_own_attributes(self._optimizer, self._own, self._classes)

    def _keep_all(self, shown: Iterable[Slot]) -> None:
        super()._keep_all(shown)
        parameters = {key for key, _ in self._states}
        for key in self._optimizer.state:
            if key not in parameters:
                self._keep_state(key)
        self._seen |= {id(slot.parameter) for slot in slots(self._optimizer)}
        self._keep_beside()
        for value in _held_by(self._own, self._classes):
            self._keep(value)


class OwnAttributeCopies(StepCopies):
    """Copies of an optimizer's own attributes and all they hold; may be restored any number of times."""

    def __init__(self, optimizer: Optimizer, *, on_host: bool) -> None:
        self._own, self._classes = own_attributes(optimizer), own_class_attributes(optimizer)
        self._elsewhere = {id(slot.parameter) for slot in slots(optimizer)}
        super().__init__(optimizer, (), on_host=on_host)

    def restore(self) -> None:
        """Restore the attributes."""
        super().restore()
        restore_own_attributes(self._optimizer, self._own, self._classes)

    def _keep_all(self, shown: Iterable[Slot]) -> None:
        self._weights_seen |= self._elsewhere  # the weights are rolled back separately
        self._seen |= self._elsewhere
        # So are the contents of `state` and the groups, which an inner optimizer may share.
        self._seen.update(map(id, (self._optimizer.state, self._optimizer.param_groups)))
        for group in self._optimizer.param_groups:
            self._seen |= {id(group), id(group["params"])}
        self._keep_beside()
        for value in _held_by(self._own, self._classes):
            self._keep(value) if not isinstance(value, Tensor) else self._keep_all_within(value)


def _held_by(own: dict[str, Any], classes: list[tuple[type, dict[str, Any]]]) -> Iterator[Any]:
    yield from own.values()
    for _, attributes in classes:
        yield from attributes.values()


def restore_own_attributes(
    optimizer: Optimizer, own: dict[str, Any], classes: Iterable[tuple[type, dict[str, Any]]] = ()
) -> None:
    """Give an optimizer exactly these attributes of its own, and its classes exactly those."""
    for kind, before in classes:
        restore_class_attributes(kind, before)
    attributes = vars(optimizer)
    for name in [name for name in attributes if is_own(name) and name not in own]:
        del attributes[name]
    attributes.update(own)


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
    size = parameter.nbytes
    values: list[Any] = [parameter.grad]
    if parameter in optimizer.state:
        values += optimizer.state[parameter].values()
    for value in values:
        if type(value) in _PLAIN_TENSORS and value.layout == torch.strided:
            size += value.nbytes
        elif isinstance(value, Tensor):
            size += sum(
                part.nbytes if part.layout == torch.strided else part._values().nbytes
                for part in _parts(value)
            )
    return size


def _parts(tensor: Tensor) -> Iterator[Tensor]:
    """The plain tensors inside a tensor: the shard of a DTensor, the codes and scales of torchao's states."""
    if not is_wrapper(tensor):
        yield tensor
        return
    names, _ = tensor.__tensor_flatten__()  # pyright: ignore[reportAttributeAccessIssue]
    for part in (getattr(tensor, name) for name in names):
        if isinstance(part, Tensor):
            yield from _parts(part)
