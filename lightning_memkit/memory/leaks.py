"""Find tensors that every step leaves behind, and the lines that made them."""

import weakref
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_memkit.memory.findings import Finding
from lightning_memkit.memory.leak_holders import LeakJudge, StorageBirth
from lightning_memkit.memory.meter import storages_of, tensors_in
from lightning_memkit.memory.origins import Place, place


class LeakWatch(TorchDispatchMode):
    r"""Records each storage allocated in a few watched steps, and reports at the end which ones leak.

    A line leaks if storages that it made in every watched step but the last are still alive after the last;
    tensors that are replaced, updated in place, prefetched or cached once are not. If only a graph keeps them
    alive, the tensor that holds the graph is named. Allocations inside compiled modules are not tracked.
    Costs some tens of microseconds an operator while a step is watched, and nothing afterwards.

    Args:
        least_bytes: the least bytes that a step must leave; tensors that keep their graph are reported
            whatever their size.
        outer: lines of the stack above the step; see `origins.place`.

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
        self._births: dict[int, StorageBirth] = {}

    @contextmanager
    def step(self) -> Iterator[None]:
        """Watch one step: forward, backward, the optimizer's step."""
        with self:
            yield
        self.steps += 1

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled code run compiled; otherwise torch would run that code eagerly from then on."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tensors_in(out):
            for storage in storages_of(tensor):
                key = storage._cdata
                known = self._births.get(key)
                if (known is None or known.storage() is None) and not _is_input(key, args, kwargs):
                    self._births[key] = StorageBirth(
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
        """The lines that leak, largest first.

        Args:
            model: its parameters, buffers, gradients and metric states don't count as leaks; holders are
                named by its attributes.
            expected: other tensors that may stay, such as optimizer states.
            least_steps: fewer watched steps give no findings.
        """
        if self.steps < max(2, least_steps):
            return []
        fine = {s._cdata for tensor in [*expected, *_known_of(model)] for s in storages_of(tensor)}
        lines: dict[Place | None, list[StorageBirth]] = {}
        for key, birth in self._births.items():
            if key not in fine and birth.storage() is not None and birth.size_bytes:
                lines.setdefault(birth.where, []).append(birth)
        needed = set(range(self.steps - 1))
        leaking = {line: births for line, births in lines.items() if needed <= {b.step for b in births}}
        made_at = {key: birth.where for key, birth in self._births.items()}
        return LeakJudge(leaking, self.steps, model, made_at).findings(self._least_bytes) if leaking else []

    def forget(self) -> None:
        """Release all records."""
        self._births.clear()

    def _forget(self, key: int, ref: Any) -> None:
        known = self._births.get(key)
        if known is not None and known.storage is ref:
            del self._births[key]


def _known_of(model: nn.Module | None) -> Iterator[Tensor]:
    """A model's tensors, including the states of torchmetrics' metrics, some of which are lists."""
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
    """Whether a storage is an operator's input: it existed before, and is not tracked."""
    inputs = tensors_in([*args, *(kwargs or {}).values()])
    return any(key == storage._cdata for tensor in inputs for storage in storages_of(tensor))
