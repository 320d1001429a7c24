"""What kind of operator it is: whether its values follow from those of its operands, and to what it writes."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_memkit.memory.meter import tensors_in

_aten = torch.ops.aten
_UNKNOWN = {_aten.empty, _aten.empty_strided, _aten.empty_like, _aten.new_empty, _aten.new_empty_strided}
_OF_SHAPE_ALONE = {
    _aten.zeros_like,
    _aten.ones_like,
    _aten.full_like,
    _aten.new_zeros,
    _aten.new_ones,
    _aten.new_full,
}
_traits: dict[str, "OperatorTraits"] = {}  # by name: an operator's own hash takes longer
_UNSCALES = _aten._amp_foreach_non_finite_check_and_unscale


@dataclass(frozen=True, kw_only=True)
class OperatorTraits:
    """What an operator is like.

    Attributes:
        is_view: its result is a view.
        follows: its values follow from those of its operands.
        of_shape_alone: they follow from the shapes already.
        has_open_shape: values may decide the shape of its result.
        written: places and names of the arguments that it writes to, except a gradient scaler's flag for infinities.
    """

    is_view: bool
    follows: bool
    of_shape_alone: bool
    has_open_shape: bool
    written: tuple[tuple[int, str], ...]

    def written_to(self, args: Any, kwargs: Any) -> Iterator[Tensor]:
        """The tensors among its arguments that it writes to."""
        for place, name in self.written:
            yield from tensors_in(args[place] if place < len(args) else kwargs.get(name))


def traits_of(func: Any) -> OperatorTraits:
    """The traits of an operator; torch looks them up anew each time that one is asked for."""
    name = func.name()
    found = _traits.get(name)
    if found is None:
        found = _traits[name] = _looked_up(func)
    return found


def _looked_up(func: Any) -> OperatorTraits:
    packet = func.overloadpacket
    written = (
        (place, argument.name)
        for place, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    return OperatorTraits(
        is_view=func.is_view,
        follows=packet not in _UNKNOWN and torch.Tag.nondeterministic_seeded not in func.tags,
        of_shape_alone=packet in _OF_SHAPE_ALONE,
        has_open_shape=torch.Tag.dynamic_output_shape in func.tags,
        written=tuple(one for one in written if not (packet is _UNSCALES and one[1] == "found_inf")),
    )
