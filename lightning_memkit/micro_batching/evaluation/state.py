"""Restore what evaluation steps change in a module, without copying outputs gathered over earlier batches."""

from typing import Any

from torch import Tensor, nn

from lightning_memkit.micro_batching.changes.rollback import Rollback

_FEW, _SMALL = 64, 4096


class EvaluationRollback(Rollback):
    """A `Rollback` that does not copy outputs that a module has gathered over earlier batches.

    In lists and dicts it copies tensors only if they are few and small (64 a container, 4096 elements each),
    such as sums and counts; others are taken for gathered outputs, which no step changes in place. torch's
    own layers without buffers are skipped: a step does not change their settings.
    """

    def _keep_module(self, path: str, owner: nn.Module) -> None:
        if owner._buffers or not type(owner).__module__.startswith("torch.nn.modules."):
            super()._keep_module(path, owner)

    def _looks_into(self, container: Any) -> bool:
        items = list(container.values()) if isinstance(container, dict) else list(container)
        tensors = [item for item in items if isinstance(item, Tensor)]
        return len(tensors) <= _FEW and all(tensor.numel() <= _SMALL for tensor in tensors)
