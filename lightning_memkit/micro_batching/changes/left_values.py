"""What a micro-batch leaves in an attribute or a list: copies without a graph, and whether it is the loss."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_memkit.micro_batching.changes.alike import alike
from lightning_memkit.micro_batching.changes.value_start import Anew


def with_untouched(whole: Any, parts: Sequence[Any]) -> Any:
    """A list's contents, with items that no micro-batch has exchanged as they were: a mean of equal ones rounds."""
    if not isinstance(whole, Anew) or any(len(part) != len(whole) for part in parts):
        return whole
    pairs = zip(whole, zip(*parts, strict=True), strict=True)
    return Anew(same[0] if all(one is same[0] for one in same) else item for item, same in pairs)


def without_graph(value: Any) -> Any:
    """A copy of a value's tensors, without their graph."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, Anew):  # torch's trees take a subclass for a leaf
        return Anew(map(without_graph, value))
    if isinstance(value, (list, tuple, dict)):
        return tree_map_only(Tensor, without_graph, value)
    return value


def is_number(value: Any) -> bool:
    """Whether a value is one of Python's numbers, and no truth value."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_plain(value: Any) -> bool:
    """Whether a value consists of numbers, strings and 0-dim tensors only."""
    return all(
        leaf.ndim == 0 if isinstance(leaf, Tensor) else isinstance(leaf, (int, float, str, type(None)))
        for leaf in tree_leaves(value)
    )


def holds(value: Any, loss: Tensor) -> bool:
    """Whether a value is the loss, or the only item that a list has gained."""
    if isinstance(value, list):
        return len(value) == 1 and holds(value[0], loss)
    if isinstance(value, Tensor):
        return value.numel() == 1 and alike(value.detach().reshape(()), loss.detach().reshape(()).to(value))
    return isinstance(value, float) and alike(value, float(loss))


def like(value: Any, loss: Tensor) -> Any:
    """The loss in the form of `value`, a tensor or a number."""
    return loss.detach().reshape(value.shape).to(value) if isinstance(value, Tensor) else float(loss)
