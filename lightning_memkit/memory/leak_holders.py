"""Find what holds the tensors that every step leaves behind: a container, a model attribute, or a graph."""

import gc
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_memkit.memory.findings import Finding
from lightning_memkit.memory.meter import storages_of, tensors_in
from lightning_memkit.memory.origins import Place, describe

_LEVELS = 3  # of nested containers that are searched for a name


@dataclass(slots=True, eq=False)
class StorageBirth:
    """A storage that was allocated in a watched step."""

    storage: "weakref.ref[torch.UntypedStorage]"
    step: int
    where: Place | None
    shape: tuple[int, ...]
    size_bytes: int


class LeakJudge:
    """Separates leaking lines whose tensors have a holder from those that only a held graph keeps alive."""

    def __init__(
        self,
        lines: dict[Place | None, list[StorageBirth]],
        steps: int,
        model: nn.Module | None,
        made_at: dict[int, Place | None],
    ) -> None:
        self._lines, self._steps, self._model, self._made_at = lines, steps, model, made_at
        line_of, first = {}, set()
        for line, births in lines.items():
            for birth in births:
                storage = birth.storage()
                if storage is not None:
                    line_of[storage._cdata] = line
                    if birth.step == 0:
                        first.add(storage._cdata)
        # One pass over all objects, since a view of a leaking storage also keeps it alive.
        self._tensors: dict[Place | None, list[Tensor]] = {}
        self._first: dict[
            Place | None, list[Tensor]
        ] = {}  # tensors of the first step, by now held only by the leak
        for thing in gc.get_objects():
            if issubclass(type(thing), Tensor):
                for key in (storage._cdata for storage in _storages_if_any(thing)):
                    if key in line_of:
                        self._tensors.setdefault(line_of[key], []).append(thing)
                        if key in first:
                            self._first.setdefault(line_of[key], []).append(thing)
        self._holders = self._find_holders()

    def findings(self, least_bytes: int) -> list[Finding]:
        """The lines whose tensors are held, largest first; a graph's bytes count for the graph's holder."""
        held = {line: births for line, births in self._lines.items() if self._holders.get(line)}
        graph_only = sum(
            b.size_bytes for line, births in self._lines.items() if line not in held for b in births
        )
        found = []
        for line, births in held.items():
            tensors = self._tensors[line]
            with_graph = any(tensor.grad_fn is not None for tensor in tensors)
            size = sum(birth.size_bytes for birth in births)
            if with_graph:
                size, graph_only = size + graph_only, 0
            elif size < least_bytes * (self._steps - 1):
                continue
            found.append(self._finding(line, births, size, with_graph))
        if graph_only and (grown := self._grown_sum(set(held))):
            found.append(grown)
        return sorted(found, key=lambda finding: -finding.size_bytes)

    def _grown_sum(self, held: set[Place | None]) -> Finding | None:
        """Find a tensor whose graph reaches back through all watched steps: `total = total + loss`."""
        births = {
            storage._cdata: birth
            for line, all_births in self._lines.items()
            if line not in held
            for birth in all_births
            if (storage := birth.storage()) is not None
        }
        for tensor in [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor)]:
            if tensor.grad_fn is None:
                continue
            reached = [births[key] for key in _saved_in_graph(tensor) & births.keys()]
            if set(range(self._steps - 1)) <= {birth.step for birth in reached}:
                made_at = [self._made_at.get(storage._cdata) for storage in _storages_if_any(tensor)]
                where = describe(next(iter(made_at), None), "no line of yours")
                return Finding(
                    kind="kept_tensors",
                    what=f"A sum that keeps the graphs of all {self._steps} steps",
                    size_bytes=sum(birth.size_bytes for birth in reached),
                    where=f"made at {where}, held by {self._name_of(tensor)}",
                    remedy="add up `tensor.detach()`, or numbers (`.item()`)",
                )
        return None

    def _name_of(self, tensor: Tensor) -> str:
        for module in self._model.modules() if self._model is not None else ():
            for name, value in vars(module).items():
                if value is tensor:
                    return f"{type(module).__name__}.{name}"
        return "no attribute of the model"

    def _finding(
        self, line: Place | None, births: list[StorageBirth], size: int, with_graph: bool
    ) -> Finding:
        graph = ", with their graph" if with_graph else ""
        holder = self._name(self._holders[line])
        remedy = (
            "keep `tensor.detach()`, or a number (`.item()`)"
            if with_graph
            else "keep what is needed on the host"
        )
        return Finding(
            kind="kept_tensors",
            what=f"Tensors of shape {list(births[-1].shape)} kept from each of {self._steps} steps{graph}",
            size_bytes=size,
            where=f"made at {describe(line, 'no line of yours')}, held by {holder}",
            remedy=f"{remedy}, and clear it",
        )

    def _find_holders(self) -> dict[Place | None, Any]:
        """A container or object that refers to a tensor of each line, if there is one in Python."""
        line_of = {id(tensor): line for line, tensors in self._first.items() for tensor in tensors}
        everything = [tensor for tensors in self._first.values() for tensor in tensors]
        own = {id(everything), *map(id, self._tensors.values()), *map(id, self._first.values())}
        holders: dict[Place | None, Any] = {}
        for container in gc.get_referrers(*everything) if everything else ():
            if id(container) in own or _is_frame(container) or isinstance(container, Tensor):
                continue
            for referent in gc.get_referents(container):
                if id(referent) in line_of:
                    holders.setdefault(line_of[id(referent)], container)
        return holders

    def _name(self, container: Any) -> str:
        """Describe a container by a model attribute that refers to it: `Model.losses, a list of 5`."""
        names = {
            id(value): f"{type(module).__name__}.{name}"
            for module in (self._model.modules() if self._model is not None else ())
            for name, value in vars(module).items()
            if name not in ("_parameters", "_buffers", "_modules")
        }
        level = [container]
        for _ in range(_LEVELS):
            for thing in level:
                if id(thing) in names:
                    return f"{names[id(thing)]}, {_kind_of(thing)}"
            level = [
                parent for parent in gc.get_referrers(*level) if parent is not level and not _is_frame(parent)
            ]
        return _kind_of(container)


def _kind_of(container: Any) -> str:
    kind = type(container).__name__
    article = "an" if kind[0].lower() in "aeiou" else "a"
    return f"{article} {kind} of {len(container)}" if hasattr(container, "__len__") else f"{article} {kind}"


def _storages_if_any(tensor: Tensor) -> list[torch.UntypedStorage]:
    try:
        return list(storages_of(tensor))
    except (RuntimeError, NotImplementedError):  # functional and lazy tensors have no storage
        return []


def _saved_in_graph(tensor: Tensor) -> set[int]:
    """The storages that a tensor's graph has saved and not yet freed."""
    found: set[int] = set()
    waiting, seen = [tensor.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting.extend(following for following, _ in node.next_functions)
        for name in dir(node):
            if name.startswith("_saved_"):
                try:
                    saved = getattr(node, name)
                except (RuntimeError, ValueError):  # freed by a backward
                    continue
                found.update(s._cdata for kept in tensors_in(saved) for s in _storages_if_any(kept))
    return found


def _is_frame(thing: Any) -> bool:
    return type(thing).__name__ in ("frame", "generator", "coroutine")
