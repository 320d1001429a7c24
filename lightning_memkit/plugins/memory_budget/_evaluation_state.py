"""What evaluation steps change in a module, to be put back: without copies of what was gathered over the batches."""

from typing import Any

from torch import Tensor, nn

from lightning_memkit.micro_batching.changes.rollback import Rollback

_FEW, _SMALL = 64, 4096


class EvaluationRollback(Rollback):
    """A `Rollback` that does not copy what a module has gathered over the batches before.

    Of tensors in lists and dicts those that are few and small are copied (64 a container, 4096 elements each:
    sums and counts); the others are outputs that are gathered, and no step writes into them. torch's own layers
    without buffers are passed over: a step does not change their settings.
    """

    def _keep_module(self, path: str, owner: nn.Module) -> None:
        if owner._buffers or not type(owner).__module__.startswith("torch.nn.modules."):
            super()._keep_module(path, owner)

    def _looks_into(self, container: Any) -> bool:
        items = list(container.values()) if isinstance(container, dict) else list(container)
        tensors = [item for item in items if isinstance(item, Tensor)]
        return len(tensors) <= _FEW and all(tensor.numel() <= _SMALL for tensor in tensors)
