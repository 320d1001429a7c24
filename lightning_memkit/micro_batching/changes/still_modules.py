"""Snapshots of modules from an earlier step, to be used again while nothing in these modules has moved.

Most of a network are layers that hold parameters, numbers and flags: walking over hundreds of them before each step
would take longer than looking whether anything in them is another object.
"""

from collections.abc import Iterable

from torch import Tensor, nn

from lightning_memkit.micro_batching.changes.kept_state import Kept, KeptDict, KeptHooks
from lightning_memkit.micro_batching.changes.kept_tensor import Place


class StillModule:
    """What was kept of one module that holds tensors, submodules and plain values only.

    Args:
        owner: the module.
        attributes: the snapshot of its attributes.
        kept: all snapshots of it but those of its tensors.
        tensors: its parameters and buffers, and where they are.
    """

    def __init__(
        self,
        owner: nn.Module,
        attributes: KeptDict,
        kept: list[Kept],
        tensors: Iterable[tuple[Place, Tensor]],
    ) -> None:
        self.attributes, self.kept, self.tensors = attributes, kept, list(tensors)
        self._owner, self._kind = owner, type(owner)
        self._held = [one for one in kept if isinstance(one, (KeptDict, KeptHooks))]

    def stands_for(self, owner: nn.Module) -> bool:
        """Whether nothing in the module is another object than it was, so that its snapshots are those of now."""
        same = owner is self._owner and type(owner) is self._kind
        return same and all(one.is_still for one in self._held)


StillModules = dict[str, StillModule]
