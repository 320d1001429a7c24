"""Facts about autograd nodes: kinds, shapes, and whether a value is computed from parameters only."""

from collections.abc import Sequence
from math import prod
from typing import Any

from torch import Tensor, nn

# Functions that pass the values of their only input on, in any shape.
PASSED = """Alias Clone Contiguous MaskedFill Permute ReshapeAlias Squeeze T ToCopy Transpose Unsqueeze UnsafeView
    View""".split()
ADDED = "Add Cat Rsub Stack Sub".split()
PRODUCTS = "Addmv Bmm Dot Mm Mv".split()  # with a constant factor they are weighted sums
# Nonlinear functions of one number.
CURVED = """Abs Acos Asin Atan Clamp ClampMax ClampMin Cos Cosh Elu Erf Exp Exp2 Expm1 Gelu LeakyRelu LinalgVectorNorm
    Log Log10 Log1P Log2 LogSigmoid Logaddexp Logsumexp Max Maximum Min Minimum Norm Pow Prod Reciprocal Relu Rsqrt
    Sigmoid Silu Sin Sinh Softplus Sqrt Std Tan Tanh Var""".split()
# Functions by which a scalar is computed from a small parameter: a learned temperature, the weight of a task.
_OF_PARAMETERS = {
    *PASSED,
    *CURVED,
    *ADDED,
    *"Div Index LogSoftmax Mean Mul Neg Select Slice Softmax Split SplitWithSizes Sum Unbind".split(),
}
PARAMETER_NUMEL = 64  # the most elements of a parameter that holds such scalars
# Functions by which a penalty is computed from weights of any size. None takes indices, which depend on rows.
_OF_WEIGHTS = {
    *PASSED,
    *CURVED,
    *ADDED,
    *PRODUCTS,
    *"""Amax Amin Cumsum Diagonal Div LinalgSvd Mean Mul Neg Select
    Slice Split SplitWithSizes Stack Sum Trace Tril Triu Unbind""".split(),
} - {"MaskedFill"}
LEAF = "torch::autograd::AccumulateGrad"
MOST_NODES = 4096  # that a walk visits
# Functions that act on each element of a vector by itself.
_BY_ELEMENT = frozenset("Add Alias Clone Div Mul Neg Rsub Sub ToCopy".split())
_VECTOR_NODES = 64  # the most nodes between a sum and the losses that were stacked for it
_CHOOSING = frozenset("Select Slice Split SplitWithSizes Unbind".split())
_KINDS: dict[type, str] = {}


def kind_of(node: Any) -> str:
    """The function that a node differentiates: `Sum` for `SumBackward0`; custom functions keep their name."""
    kind = _KINDS.get(type(node))
    if kind is None:
        name = node.name()
        stem, found, version = name.rpartition("Backward")
        if not (found and version.isdigit()):
            return name
        # Only torch's own classes are cached: they live for ever, a user's would be kept alive by the cache.
        if type(node).__name__ != name:
            return stem
        kind = _KINDS[type(node)] = stem
    return kind


def shape_into(node: Any, index: int) -> Sequence[int]:
    """The shape of a node's `index`-th input, which must have a gradient."""
    child, output = node.next_functions[index]
    return child._input_metadata[output].shape


def numel_into(node: Any, index: int) -> int:
    """The number of elements of a node's `index`-th input, which must have a gradient."""
    return prod(shape_into(node, index))


def numel_out(node: Any, output: int) -> int:
    """The number of elements of one of a node's outputs."""
    return prod(node._input_metadata[output].shape)


def of_parameters(node: Any) -> bool:
    """Whether a scalar is computed from small parameters only, and so is the same in all micro-batches."""
    nodes = [node]
    for _ in range(64):
        if not nodes:
            return True
        current = nodes.pop()
        if current.name() != LEAF and kind_of(current) not in _OF_PARAMETERS:
            return False
        if prod(current._input_metadata[0].shape) > PARAMETER_NUMEL:
            return False
        nodes.extend(child for child, _ in current.next_functions if child is not None)
    return False


def of_weights(node: Any) -> bool:
    """Whether a scalar is computed from parameters only: a penalty, the same in all micro-batches."""
    nodes, seen = [node], {node}
    while nodes:
        current = nodes.pop()
        if current.name() == LEAF:
            if not isinstance(current.variable, nn.Parameter):
                return False
            continue
        kind = kind_of(current)
        if kind not in _OF_WEIGHTS or len(seen) > MOST_NODES:
            return False
        children = [child for child, _ in current.next_functions]
        if None in children and kind not in ADDED and not _by_number(current, children.index(None)):
            return False
        new = {child for child in children if child is not None} - seen
        seen |= new
        nodes.extend(new)
    return True


def _by_number(node: Any, index: int) -> bool:
    """Whether the operand without a gradient of a product or quotient is a single number."""
    value = getattr(node, "_saved_other" if index else "_saved_self", None)
    return isinstance(value, Tensor) and value.numel() == 1


def stacks_numbers(node: Any, numel: int) -> bool:
    """Whether a vector is a stack of `numel` scalars with graphs of their own, changed elementwise only.

    Such scalars are the losses of tasks or of rows: `torch.stack(losses) * weights`.
    """
    return _stacks(node, numel, [_VECTOR_NODES])


def divides_columns(node: Any, numel: int) -> bool:
    """Whether a vector has one quotient a column: sums or means over the rows, each divided by its own number.

    As in the mean of several tasks of which each row has some: `((loss * mask).sum(0) / mask.sum(0)).mean()`.
    """
    if not 1 < numel <= PARAMETER_NUMEL:
        return False
    for _ in range(_VECTOR_NODES):
        inputs = enumerate(node.next_functions)
        batched = [(i, child) for i, (child, _) in inputs if child is not None and not of_parameters(child)]
        if len(batched) != 1 or (kind_of(node) not in _BY_ELEMENT and kind_of(node) not in PASSED):
            return False
        index, child = batched[0]
        if len(shape_into(node, index)) != 1 or numel_into(node, index) != numel:
            return False
        if reduces_rows(child):
            return column_divisor(node, index, numel) is not None
        node = child
    return False


def column_divisor(node: Any, index: int, numel: int) -> Tensor | None:
    """The vector by which a node divides its `index`-th input, or one over that with which it multiplies it."""
    kind = kind_of(node)
    if (
        kind not in ("Div", "Mul")
        or (kind == "Div" and index == 1)
        or node.next_functions[1 - index][0] is not None
    ):
        return None
    vector = node._saved_other if index == 0 else node._saved_self
    if not isinstance(vector, Tensor) or vector.numel() != numel:
        return None
    return vector.detach() if kind == "Div" else vector.detach().reciprocal()


def reduces_rows(node: Any) -> bool:
    """Whether a node sums or averages over the first dimension, and over others perhaps."""
    if kind_of(node) not in ("Mean", "Nansum", "Sum") or node.next_functions[0][0] is None:
        return False
    ndim = len(shape_into(node, 0))
    return any(signed(dim) % ndim == 0 for dim in getattr(node, "_saved_dim", None) or ())


def signed(number: int) -> int:
    """A dimension or an index that a node has saved; negative ones are saved as unsigned 64-bit numbers."""
    return (number + 2**63) % 2**64 - 2**63


def chosen_by(node: Any, output: int) -> tuple[str, int, int] | None:
    """What a node chooses of each row of its input, as `logits[:, 2]` does; None if it chooses rows, or all.

    Args:
        node: the node; selections, slices and splits choose, and compiled modules with several outputs.
        output: the number of its output.

    Returns:
        The node's kind, the dimension, and the first index, or the number of the output.
    """
    kind = kind_of(node)
    if kind not in _CHOOSING:
        is_torchs_own = type(node) in _KINDS  # these are many, and asking for metadata is slow
        return None if is_torchs_own or len(node._input_metadata) == 1 else (kind, 0, output)
    if node.next_functions[0][0] is None:
        return None
    dim = signed(node._saved_dim) % len(shape_into(node, 0))
    if dim == 0:
        return None
    if kind in ("Select", "Slice"):
        output = signed(node._saved_index if kind == "Select" else node._saved_start or 0)
    return kind, dim, output


def is_number_viewed(node: Any) -> bool:
    """Whether a node makes a vector of one scalar: `loss.unsqueeze(0)` (as `DataParallel` does), say."""
    if kind_of(node) not in PASSED or node.next_functions[0][0] is None:
        return False
    return len(shape_into(node, 0)) == 0 and len(node._input_metadata[0].shape) == 1


def _stacks(node: Any, numel: int, left: list[int]) -> bool:
    left[0] -= 1
    kind = kind_of(node)
    if kind in ("Cat", "Stack"):
        return len(node.next_functions) == numel
    if is_number_viewed(node):
        return True
    if kind not in _BY_ELEMENT or left[0] < 0:
        return False
    stacked = []
    for index, (child, _) in enumerate(node.next_functions):
        if child is None:
            continue
        if numel_into(node, index) != numel:
            return False  # a scalar shared by all elements can't be scaled for each of them
        if not of_parameters(child):
            if not _stacks(child, numel, left):
                return False
            stacked.append(index)
    if kind in ("Mul", "Div") and stacked != [0] and not (kind == "Mul" and stacked == [1]):
        return False
    return bool(stacked)


def factors_below(node: Any) -> list[Any]:
    """The products and quotients from a node of a stacked vector (see `stacks_numbers`) down to its stack."""
    found = []
    while kind_of(node) in _BY_ELEMENT:
        if kind_of(node) in ("Mul", "Div"):
            found.append(node)
        children = [child for child, _ in node.next_functions if child is not None]
        stacked = [child for child in children if not of_parameters(child)]
        if len(stacked) != 1:
            break
        (node,) = stacked
    return found


def as_saved(tensor: Tensor) -> Tensor:
    """An unpack hook that returns the saved tensor as it is, which costs nothing; see `is_packed`."""
    return tensor


def is_packed(saved: Any) -> bool:
    """Whether unpacking a saved tensor may copy it from the host or recompute a forward."""
    hook = getattr(saved, "unpack_hook", None)
    return hook is not None and hook is not as_saved
