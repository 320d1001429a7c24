"""The parts of a module whose weights are there together: all of it, or what FSDP2 gathers at once."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

_FSDP = "torch.distributed.fsdp"


@dataclass(frozen=True)
class WeightUnit:
    """Modules whose weights are gathered together.

    Attributes:
        gatherer: the module that FSDP2 sharded; None where nothing is sharded.
        tops: the outermost of the modules, by name, that hold none sharded by themselves.
    """

    gatherer: Any = None
    tops: dict[str, nn.Module] = field(default_factory=dict)

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Run the body with the unit's weights in place. All ranks must enter it."""
        if self.gatherer is None:
            yield
            return
        self.gatherer.unshard()
        try:
            yield
        finally:
            self.gatherer.reshard()

    def modules(self) -> dict[str, nn.Module]:
        """All of them, by name, in the order of `named_modules`."""
        return {
            f"{name}.{inner}" if inner else name: part
            for name, top in self.tops.items()
            for inner, part in top.named_modules()
        }


def units_of(root: nn.Module) -> list[WeightUnit]:
    """The units of all submodules; the same ones in the same order on all ranks."""
    units: dict[int | None, WeightUnit] = {}
    _collect(root, "", _gatherer(root, None), units)
    return list(units.values())


def unit_numbers(root: nn.Module) -> Mapping[nn.Module, int]:
    """The number of each submodule's unit, of those that hold no unit of their own."""
    return {part: number for number, unit in enumerate(units_of(root)) for part in unit.modules().values()}


def may_be_sharded() -> bool:
    """Whether there may be modules whose weights are not all there at once."""
    # Not imported, FSDP2 has sharded nothing.
    has_ranks = torch.distributed.is_available() and torch.distributed.is_initialized()
    return has_ranks and _FSDP in sys.modules


def is_sharded(module: nn.Module) -> bool:
    """Whether FSDP2 gathers weights around this module's forward."""
    return may_be_sharded() and isinstance(module, sys.modules[_FSDP].FSDPModule)


def sharded_within(module: nn.Module) -> list[str]:
    """The names of the modules in it that FSDP2 shards by themselves."""
    return [name for name, part in module.named_modules() if part is not module and is_sharded(part)]


def _collect(
    module: nn.Module, prefix: str, gatherer: nn.Module | None, units: dict[int | None, WeightUnit]
) -> None:
    for name, child in module.named_children():
        path, own = f"{prefix}{name}", _gatherer(child, gatherer)
        if sharded_within(child):
            _collect(child, f"{path}.", own, units)
        else:
            unit = units.setdefault(None if own is None else id(own), WeightUnit(own))
            unit.tops[path] = child


def _gatherer(module: nn.Module, outer: nn.Module | None) -> nn.Module | None:
    return module if is_sharded(module) else outer
