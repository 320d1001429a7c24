"""Find tensors that every step leaves behind, and the line that made them."""

import gc
import weakref
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_memkit.memory.findings import Finding
from lightning_memkit.memory.meter import storages_of, tensors_in
from lightning_memkit.memory.origins import Place, describe, place

_LEVELS = 3  # of containers within containers that are looked through for a name


@dataclass(slots=True, eq=False)
class _Birth:
    """A storage made in a watched step."""

    storage: "weakref.ref[torch.UntypedStorage]"
    step: int
    where: Place | None
    shape: tuple[int, ...]
    size_bytes: int


class LeakWatch(TorchDispatchMode):
    r"""Notes each storage that is made in a few watched steps, and judges at the end which of them stay for good.

    A line leaks where what it made in every watched step but the last is still alive after the last: what is
    replaced, updated in place, prefetched or cached once is not. Where only a graph keeps them, the tensor that holds
    the graph is named. What a compiled module makes inside is not followed.
    Costs some tens of microseconds an operator while a step is watched, and nothing afterwards.

    Args:
        least_bytes: a step must leave at least so many; tensors that keep their graph are named whatever their size.
        outer: lines that are not the user's code within a step, see `origins.place`.

    Example:
        >>> watch = LeakWatch()
        >>> for batch in batches[:5]:
        ...     with watch.step():
        ...         train(batch)
        >>> print(*watch.findings(model), sep="\n")
    """

    def __init__(self, *, least_bytes: int = 1024, outer: Collection[Place] = ()) -> None:
        super().__init__()
        self.steps = 0
        self._least_bytes = least_bytes
        self._outer = outer
        self._births: dict[int, _Birth] = {}

    @contextmanager
    def step(self) -> Iterator[None]:
        """One watched step: forward, backward, the optimizer's step."""
        with self:
            yield
        self.steps += 1

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled code run compiled; otherwise torch would never run that code compiled again."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tensors_in(out):
            for storage in storages_of(tensor):
                key = storage._cdata
                known = self._births.get(key)
                if (known is None or known.storage() is None) and not _is_input(key, args, kwargs):
                    self._births[key] = _Birth(
                        weakref.ref(storage, lambda ref, key=key: self._forget(key, ref)),
                        self.steps,
                        place(self._outer),
                        tuple(tensor.shape),
                        storage.nbytes(),
                    )
        return out

    def findings(
        self, model: nn.Module | None = None, expected: Iterable[Tensor] = (), least_steps: int = 4
    ) -> list[Finding]:
        """The lines that leak, the largest first.

        Args:
            model: its parameters, buffers, gradients and metrics' states are no leaks; its attributes name holders.
            expected: other tensors that may stay, such as optimizer states.
            least_steps: fewer watched steps find nothing.
        """
        if self.steps < max(2, least_steps):
            return []
        fine = {s._cdata for tensor in [*expected, *_known_of(model)] for s in storages_of(tensor)}
        lines: dict[Place | None, list[_Birth]] = {}
        for key, birth in self._births.items():
            if key not in fine and birth.storage() is not None and birth.size_bytes:
                lines.setdefault(birth.where, []).append(birth)
        needed = set(range(self.steps - 1))
        leaking = {line: births for line, births in lines.items() if needed <= {b.step for b in births}}
        made_at = {key: birth.where for key, birth in self._births.items()}
        return _Judge(leaking, self.steps, model, made_at).findings(self._least_bytes) if leaking else []

    def forget(self) -> None:
        """Let go of all notes."""
        self._births.clear()

    def _forget(self, key: int, ref: Any) -> None:
        known = self._births.get(key)
        if known is not None and known.storage is ref:
            del self._births[key]


class _Judge:
    """Sorts leaking lines into those whose tensors somebody holds, and those that only a held graph keeps."""

    def __init__(
        self,
        lines: dict[Place | None, list[_Birth]],
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
        # One pass over all objects: a view of a leaking storage holds it as the tensor itself does.
        self._tensors: dict[Place | None, list[Tensor]] = {}
        self._first: dict[
            Place | None, list[Tensor]
        ] = {}  # those of the first step, which nothing else holds
        for thing in gc.get_objects():
            if issubclass(type(thing), Tensor):
                for key in (storage._cdata for storage in _storages_if_any(thing)):
                    if key in line_of:
                        self._tensors.setdefault(line_of[key], []).append(thing)
                        if key in first:
                            self._first.setdefault(line_of[key], []).append(thing)
        self._holders = self._find_holders()

    def findings(self, least_bytes: int) -> list[Finding]:
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
        """A tensor whose graph reaches back through all watched steps: `total = total + loss`."""
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

    def _finding(self, line: Place | None, births: list[_Birth], size: int, with_graph: bool) -> Finding:
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
        """A container or object that refers to a tensor of each line, where there is one in Python."""
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
        """`Model.losses, a list of 5`, as far as the model's attributes tell."""
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


def _known_of(model: nn.Module | None) -> Iterator[Tensor]:
    """A model's tensors, among them the states of torchmetrics' metrics, which are lists for some."""
    if model is None:
        return
    yield from model.buffers()
    for parameter in model.parameters():
        yield parameter
        if parameter.grad is not None:
            yield parameter.grad
    for module in model.modules():
        for name in getattr(module, "_defaults", None) or () if hasattr(module, "add_state") else ():
            yield from tensors_in(getattr(module, name, None))


def _is_input(key: int, args: Any, kwargs: Any) -> bool:
    """Whether a storage is an operator's input: it was there before, and is not tracked."""
    inputs = tensors_in([*args, *(kwargs or {}).values()])
    return any(key == storage._cdata for tensor in inputs for storage in storages_of(tensor))


def _storages_if_any(tensor: Tensor) -> list[torch.UntypedStorage]:
    try:
        return list(storages_of(tensor))
    except (RuntimeError, NotImplementedError):  # a functional or lazy tensor has none
        return []


def _saved_in_graph(tensor: Tensor) -> set[int]:
    """The storages that a tensor's graph has saved and not freed."""
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
