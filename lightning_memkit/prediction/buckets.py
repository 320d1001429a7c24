"""DDP's memory without its C++ reducer, which can't handle fake tensors: buckets beside the gradients.

Source: `torch/csrc/distributed/c10d/reducer.cpp` and `torch/nn/parallel/distributed.py` of torch 2.13.
Gradients are copied into flat buckets and back. The first step has one bucket for each dtype (or 1 MiB and
then 25 MiB, if unused parameters are searched for); before the second forward the buckets are rebuilt, in the
order in which gradients arrived. With `gradient_as_bucket_view` each gradient is a view of its bucket, and
the tensor that autograd computed is freed after the copy.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

_MIB = 1 << 20
_FIRST_BUCKET, _BUCKET = 1 * _MIB, 25 * _MIB


class BucketedModel(DistributedDataParallel):
    """Replaces `DistributedDataParallel` in a simulation: makes the same allocations, and reduces nothing.

    Args:
        module: the module whose gradients are reduced.
        bucket_cap_mb: as in DDP, like the options below. Other options don't change allocations.
    """

    communicating: Callable[[], AbstractContextManager[Any]] = staticmethod(
        nullcontext
    )  # context in which buckets are allocated

    def __init__(
        self,
        module: nn.Module,
        *,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        **others: Any,
    ) -> None:
        nn.Module.__init__(self)
        self.module = module
        self.find_unused_parameters, self.static_graph = find_unused_parameters, static_graph
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.device_ids = others.get("device_ids")
        self.require_backward_grad_sync = self.require_forward_param_sync = True
        cap = _BUCKET if bucket_cap_mb is None else int(bucket_cap_mb * _MIB)
        first = _FIRST_BUCKET if bucket_cap_mb is None else cap
        self.reducer: Any = _Reducer(self, (first, cap))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward after DDP's preparations."""
        if torch.is_grad_enabled():  # also if this batch's gradients are not reduced
            self.reducer._rebuild_buckets()
        self.reducer.prepare_for_backward([])
        return self.module(*args, **kwargs)

    def join(self, *args: Any, **kwargs: Any) -> AbstractContextManager[Any]:  # pyright: ignore
        """Do nothing: all simulated ranks have equally many batches."""
        return nullcontext()

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        return {}


class _Reducer:
    def __init__(self, model: BucketedModel, caps: tuple[int, int]) -> None:
        self._model, self._caps = model, caps
        ignored = getattr(model.module, "_ddp_params_and_buffers_to_ignore", ())
        self._parameters = [
            parameter
            for name, parameter in model.module.named_parameters()
            if parameter.requires_grad and name not in ignored
        ]
        if not self._parameters:
            raise RuntimeError(
                "DistributedDataParallel is not needed when a module doesn't have any parameters that require a "
                "gradient."
            )
        self._views: dict[Tensor, Tensor] = {}
        self._came: list[Tensor] = []
        self._rebuilds = model.static_graph or not model.find_unused_parameters
        self._is_synced = True
        self._make_buckets(list(reversed(self._parameters)), None if self._rebuilds else caps)
        for parameter in self._parameters:
            parameter.register_post_accumulate_grad_hook(self._arrived)

    def prepare_for_backward(self, outputs: Any) -> None:
        self._is_synced = self._model.require_backward_grad_sync and torch.is_grad_enabled()

    def _delay_all_reduce(self) -> None:
        """Do nothing in a static graph's first step, since nothing is reduced here."""

    def _rebuild_buckets(self) -> bool:
        if not self._rebuilds or len(self._came) < len(self._parameters):
            return False
        self._rebuilds = False
        self._make_buckets(self._came, self._caps)
        self._came = []
        return True

    def _make_buckets(self, parameters: list[Tensor], caps: tuple[int, int] | None) -> None:
        before, self._views = self._views, {}
        del before  # frees buckets without gradient views before new ones are made
        with torch.no_grad(), self._model.communicating():
            for bucket in _buckets(parameters, caps):
                self._fill(bucket)

    def _fill(self, bucket: list[Tensor]) -> None:
        flat = torch.empty(
            sum(parameter.numel() for parameter in bucket), dtype=bucket[0].dtype, device=bucket[0].device
        )
        start = 0
        for parameter in bucket:
            view = flat[start : start + parameter.numel()].view(parameter.shape)
            self._views[parameter] = view
            start += parameter.numel()
            if self._model.gradient_as_bucket_view and parameter.grad is not None:
                parameter.grad = view

    def _arrived(self, parameter: Tensor) -> None:
        if not self._is_synced:
            return
        if self._rebuilds:
            self._came.append(parameter)
        if self._model.gradient_as_bucket_view:
            parameter.grad = self._views[parameter]


def _buckets(parameters: Iterable[Tensor], caps: tuple[int, int] | None) -> Iterator[list[Tensor]]:
    """Parameters of one dtype, grouped by bucket size; a small first bucket lets reduction start early."""
    kinds: dict[torch.dtype, list[Tensor]] = {}
    for parameter in parameters:
        kinds.setdefault(parameter.dtype, []).append(parameter)
    for kind in kinds.values():
        open_: list[Tensor] = []
        cap = None if caps is None else caps[0]
        for parameter in kind:
            open_.append(parameter)
            if cap is not None and caps is not None and sum(one.nbytes for one in open_) >= cap:
                yield open_
                open_, cap = [], caps[1]
        if open_:
            yield open_
