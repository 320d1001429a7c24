"""Metric objects that are called in the step: of a batch in micro-batches their value is the whole batch's."""

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from lightning_memkit.micro_batching.changes.own_objects import is_metric


class BatchMetrics:
    """Gives each metric that is called, and then logged `on_step`, the value of all micro-batches of a batch.

    Its own call computes the value of one micro-batch alone. A copy without its states gets the same updates, which is
    the price: a second update of each metric that is called.

    Args:
        module: holds the metrics.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        # By the metric's id: its hash is another one after each update.
        self._copies: dict[int, list[Any]] = {}  # one for each call that a step makes
        self._calls: dict[int, int] = {}  # of the micro-batch at hand
        self._counts = True

    @contextmanager
    def watched(self) -> Iterator[Callable[[], None]]:
        """A context for a batch's micro-batches; yields a function that sets the metrics' values after the last."""
        metrics = self._metrics()
        called: dict[int, int] = {}

        def note(metric: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
            if not self._counts:
                return
            number = self._calls.get(id(metric), 0)
            self._calls[id(metric)] = number + 1
            copies = self._copies.setdefault(id(metric), [])
            if number == len(copies):
                copies.append(_without_states(metric))
            if number >= called.get(id(metric), 0):
                copies[number].reset()
                called[id(metric)] = number + 1
            copies[number].update(*args, **kwargs)

        def set_values() -> None:
            for metric in metrics:
                if calls := called.get(id(metric)):
                    of_batch, own = self._copies[id(metric)][calls - 1], vars(metric)
                    # As in the metric's own call.
                    vars(of_batch).update(
                        _to_sync=own["dist_sync_on_step"], _should_unsync=False, _computed=None
                    )
                    own["_forward_cache"] = of_batch.compute()

        self.begin_part(counts=True)
        handles = [metric.register_forward_hook(note, with_kwargs=True) for metric in metrics]
        try:
            yield set_values
        finally:
            for handle in handles:
                handle.remove()

    def begin_part(self, *, counts: bool) -> None:
        """Say that a micro-batch begins; what ranks repeat, and the whole batch that is looked at, do not count."""
        self._calls, self._counts = {}, counts

    def _metrics(self) -> list[nn.Module]:
        """The metrics whose call is torchmetrics' own; wrappers call others in ways of their own."""
        return [one for one in self._module.modules() if is_metric(one) and _is_plain(type(one))]


def _is_plain(kind: type[nn.Module]) -> bool:
    return kind.forward.__module__ == "torchmetrics.metric"


def _without_states(module: nn.Module) -> Any:
    """A metric that shares everything but states, and metrics within it, with the original."""
    made = copy.copy(module)
    own = vars(made)
    own["_forward_hooks"], own["_forward_hooks_with_kwargs"] = OrderedDict(), OrderedDict()
    own["_modules"] = {
        name: _without_states(child) if child is not None and any(map(is_metric, child.modules())) else child
        for name, child in module._modules.items()
    }
    for name, default in own.get("_defaults", {}).items():
        if isinstance(default, list):
            own[name] = []  # a reset clears the list itself
    return made
