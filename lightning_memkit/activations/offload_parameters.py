"""Tells parameters from activations among the tensors that autograd saves."""

from collections.abc import Iterator, Set

from torch import Tensor, nn

from lightning_memkit.utilities.tensors import is_wrapper

# Autograd's names of views and casts: a chain of these that starts at a parameter still counts as the
# parameter.
_PASSING = (
    "Alias", "AsStrided", "Clone", "Expand", "Permute", "ReshapeAlias", "Select", "Slice", "Split", "Squeeze",
    "TBackward", "ToCopy", "Transpose", "Unbind", "UnsafeView", "Unsqueeze", "View",
)  # fmt: skip
_LONGEST_CHAIN = 8


class Weights:
    """Recognizes saved tensors of a block that are parameters or buffers, or views, transposes and casts of them.

    A frozen parameter's cast leaves no trace in autograd's graph, so it is recognized by dtype and shape.

    Args:
        block: the block whose forward runs now. Its parameters are read now, because FSDP2 replaces them by
            gathered ones during a forward.
        elsewhere: the result of `stored_weights` for the whole model.
    """

    def __init__(self, block: nn.Module, elsewhere: Set[int]) -> None:
        self._elsewhere = elsewhere
        self._block = block
        self._look()

    def _look(self) -> None:
        parameters = list(self._block.parameters())
        # A submodule that is sharded by itself gets its gathered parameters later in the block's forward.
        self._changing = any(map(is_wrapper, parameters))
        self._here = stored_weights(self._block)
        self._frozen = {
            (shape, parameter.dtype)
            for parameter in parameters
            if not parameter.requires_grad
            for shape in (tuple(parameter.shape), tuple(parameter.shape[::-1]))
        }

    def has(self, tensor: Tensor) -> bool:
        """Whether a saved tensor is a parameter or buffer, or made of one."""
        if self._changing:
            self._look()
        storage = tensor.untyped_storage()._cdata
        if storage in self._here or storage in self._elsewhere:
            return True
        if tensor.grad_fn is None:
            shape = tuple(tensor.shape)
            return any(shape == known and tensor.dtype != dtype for known, dtype in self._frozen)
        return _made_of_a_parameter(tensor)


def _made_of_a_parameter(tensor: Tensor) -> bool:
    node = tensor.grad_fn
    for _ in range(_LONGEST_CHAIN):
        if node is None:
            return False
        leaf = getattr(node, "variable", None)  # only AccumulateGrad nodes have one
        if leaf is not None:
            return isinstance(leaf, nn.Parameter)
        if not node.name().startswith(_PASSING):
            return False
        node = node.next_functions[0][0]
    return False


def stored_weights(module: nn.Module) -> set[int]:
    """The storages of a module's parameters and buffers, by the addresses of their handles."""
    return set(_storages(module))


def _storages(module: nn.Module) -> Iterator[int]:
    for tensor in (*module.parameters(), *module.buffers()):
        if not is_wrapper(tensor):
            yield tensor.untyped_storage()._cdata
