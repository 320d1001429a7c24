"""What a tape must know about an operator before it may recompute it."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

_UNFILLED = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted"}
_NEVER_TWICE = ("c10d", "_c10d_functional", "_dtensor", "fsdp", "symm_mem")
# Their outputs are small and decide what runs next: experts, rows, positions.
_DECISIONS = {"topk", "sort", "argsort", "argmax", "argmin", "multinomial", "nonzero", "bucketize", "histc"}
# Their schemas don't declare that they write the running statistics.
_BATCH_NORMS = {"native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"}
_MATMULS = {
    "mm", "bmm", "addmm", "baddbmm", "matmul", "linear", "convolution", "_grouped_mm", "_scaled_mm",
    "mkldnn_linear", "einsum", "addbmm",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Kind:
    """How a tape treats an operator.

    Args:
        name: the operator's name without namespace and overload, such as `mm`.
        view: its output shares its input's storage: nothing is allocated, nothing is recorded.
        written: the positions of the arguments that it writes to.
        written_names: the keyword arguments that it writes to.
        random: it draws from torch's generators, whose state is saved for recomputation.
        unfilled: its output is uninitialized; what fills it may be invisible to the dispatcher.
        once: it must not run twice (collectives), or its output decides what runs next; always kept.
    """

    name: str
    view: bool
    written: tuple[int, ...]
    written_names: tuple[str, ...]
    random: bool
    unfilled: bool
    once: bool


@cache
def kind_of(func: Any) -> Kind:
    """The kind of an operator, read from its schema once."""
    schema, packet = func._schema, func._schema.name.split("::")
    namespace, name = packet[0], packet[-1]
    written = [
        (index, argument)
        for index, argument in enumerate(schema.arguments)
        if (argument.alias_info is not None and argument.alias_info.is_write)
        or (name in _BATCH_NORMS and argument.name in ("running_mean", "running_var"))
    ]
    return Kind(
        name=name,
        view=bool(getattr(func, "is_view", False)),
        written=tuple(index for index, argument in written if not argument.kwarg_only),
        written_names=tuple(argument.name for _, argument in written),
        random=torch.Tag.nondeterministic_seeded in func.tags,
        unfilled=name in _UNFILLED,
        once=namespace in _NEVER_TWICE or name in _DECISIONS,
    )


def is_attention(name: str) -> bool:
    """Whether an operator is a fused attention, of torch or of a library (flash-attn, xformers)."""
    return "attention" in name or "attn" in name or "_flash" in name


def is_matmul(name: str) -> bool:
    """Whether an operator's time is that of matrix products or convolutions; attention does not count."""
    return name in _MATMULS
