"""Mixtures of experts: bytes that are resident, and bytes that a token activates."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from lightning_memkit.memory.meter import storages_of
from lightning_memkit.memory.units import format_bytes

_CHOSEN = ("top_k", "num_experts_per_tok", "num_selected_experts", "experts_per_token")
_NUMBER = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True, kw_only=True)
class ExpertBytes:
    """The weights of a module's experts in bytes, summed over all ranks that shard them.

    Attributes:
        weights: of the whole module.
        resident: of all experts.
        active: of the experts that a token uses.
        held: of all experts, the bytes on this rank.
        experts: experts in a layer.
        chosen: experts in a layer that a token uses.
        layers: mixtures in the module.
    """

    weights: int
    resident: int
    active: int
    held: int
    experts: int
    chosen: int
    layers: int

    def __str__(self) -> str:
        here = "" if self.held >= self.resident else f", {format_bytes(self.held)} of them on this rank"
        rest = self.weights - self.resident
        return (
            f"experts: {self.layers} layers of {self.experts}, {self.chosen} for a token: of weights of "
            f"{format_bytes(self.weights)}, {format_bytes(self.resident)} are resident experts{here}, and a token "
            f"finds {format_bytes(rest + self.active)} active"
        )


def expert_bytes(module: nn.Module) -> ExpertBytes | None:
    """Resident and active bytes of a module's experts; None if no mixture is found.

    A mixture is a module whose class is called `Experts`, or a `ModuleList` called `experts`; the number of
    experts that a token uses is an attribute of it, of its router or of their parent (`top_k`), or of the
    config (`num_experts_per_tok`).
    """
    found = list(_mixtures(module))
    if not found:
        return None
    resident = active = held = 0
    for mixture, experts, chosen in found:
        whole = sum(parameter.numel() * parameter.element_size() for parameter in mixture.parameters())
        resident += whole
        active += whole * chosen // experts
        held += sum(
            storage.nbytes() for parameter in mixture.parameters() for storage in storages_of(parameter)
        )
    _, experts, chosen = found[0]
    return ExpertBytes(
        weights=sum(parameter.numel() * parameter.element_size() for parameter in module.parameters()),
        resident=resident,
        active=active,
        held=held,
        experts=experts,
        chosen=chosen,
        layers=len(found),
    )


def _mixtures(module: nn.Module) -> Iterator[tuple[nn.Module, int, int]]:
    """Each mixture, with the number of its experts and of those that a token uses."""
    modules = dict(module.named_modules())
    for name, one in modules.items():
        is_list = isinstance(one, nn.ModuleList) and name.rpartition(".")[2] == "experts"
        if not (is_list or "Experts" in type(one).__name__) or not any(True for _ in one.parameters()):
            continue
        holder = modules[name.rpartition(".")[0]]
        near = (one, holder, *holder.children(), *_configs(module))
        experts = len(one) if isinstance(one, nn.ModuleList) else _first(near, _NUMBER)
        chosen = _first(near, _CHOSEN)
        if experts and chosen:
            yield one, experts, min(chosen, experts)


def _configs(module: nn.Module) -> Iterator[Any]:
    """Transformers' configs within a module."""
    return (part.config for part in module.modules() if hasattr(part, "config"))


def _first(owners: Any, names: tuple[str, ...]) -> int:
    values = (getattr(owner, name, None) for owner in owners for name in names)
    return next((value for value in values if isinstance(value, int) and value > 0), 0)
