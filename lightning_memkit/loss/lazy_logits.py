"""Logits that are computed only when something reads them; `F.cross_entropy` uses the hidden states instead."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_memkit.loss.head import linear_cross_entropy
from lightning_memkit.memory.meter import unmetered

_SAME_ROWS = frozenset({"view", "reshape", "flatten", "squeeze", "unsqueeze", "contiguous", "view_as"})
_CASTS = frozenset({"float", "to", "double"})
_PRODUCTS = frozenset({"mul", "multiply", "__mul__", "__rmul__"})
_QUOTIENTS = frozenset({"div", "divide", "true_divide", "__truediv__"})
_TRANSPOSITIONS = frozenset({"transpose", "swapaxes", "swapdims"})
_FACTS = frozenset(
    {
        "size", "dim", "ndimension", "numel", "nelement", "is_floating_point", "is_complex", "element_size",
        "get_device", "stride", "storage_offset", "is_contiguous", "__len__", "__hash__",
        "register_hook", "is_inference", "untyped_storage",
    }
)  # fmt: skip
_VALUES = frozenset({"data", "T", "mT", "H", "mH", "real", "imag"})  # properties that return values


@dataclass(frozen=True, kw_only=True)
class LogitsRecipe:
    """How to compute lazy logits.

    Args:
        head: the linear layer.
        hidden: its input, in the rows that are left after slicing.
        compute: computes the whole logits as the layer would, with all recorded operations applied.
        inner: the factor of the logits before a tanh, or at all.
        outer: the factor of the tanh; None: no tanh.
        classes_second: dimensions 1 and 2 are swapped, as `F.cross_entropy` expects it for sequences.
        detached: no gradient flows back to the head.
        options: `backend` and `skip_ignored` of `linear_cross_entropy`.
        report: called with the operation that forced the logits to be computed.
    """

    head: nn.Module
    hidden: Tensor
    compute: Callable[[], Tensor]
    inner: float = 1.0
    outer: float | None = None
    classes_second: bool = False
    detached: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    report: Callable[[str, Tensor], None] = lambda name, logits: None

    def loss(self, labels: Tensor, **options: Any) -> Tensor:
        """The cross-entropy, computed directly from the hidden states."""
        head: Any = self.head
        # outer * tanh(inner * x) caps logits scaled by inner * outer at `outer`.
        scale = self.inner if self.outer is None else self.inner * self.outer
        options |= {"scale": scale, "softcap": self.outer, **self.options}
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.detached):
            return linear_cross_entropy(self.hidden, head.weight, labels, bias=head.bias, **options)


class LazyLogits(Tensor):
    """A tensor without storage that stands for the output of a linear head.

    Slices of rows, reshapes, casts, a scale and a soft cap are recorded; `F.cross_entropy` with class indices
    becomes `linear_cross_entropy`; any other operation computes the logits, once, as if they had always
    existed.
    """

    _recipe: LogitsRecipe
    _value: Tensor | None

    @staticmethod
    def __new__(cls, recipe: LogitsRecipe, shape: torch.Size, dtype: torch.dtype) -> "LazyLogits":
        """A tensor of this shape that holds only the recipe."""
        weight: Any = recipe.head.weight
        differentiable = torch.is_grad_enabled() and (recipe.hidden.requires_grad or weight.requires_grad)
        differentiable = differentiable and not recipe.detached
        made: Any = torch.Tensor._make_wrapper_subclass(
            cls,
            shape,
            dtype=dtype,
            device=recipe.hidden.device,
            requires_grad=differentiable,
            storage_size=0,  # otherwise every byte count would include the logits
        )
        made._recipe, made._value = recipe, None
        if differentiable:
            with torch._C.DisableTorchFunctionSubclass():
                made.register_hook(_refuse_gradient)
        return made

    def __repr__(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return f"{type(self).__name__}({tuple(self.shape)}, {self.dtype}, not computed)"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        owner = getattr(getattr(func, "__self__", None), "__name__", "") if name == "__get__" else ""
        if name in _FACTS or (name == "__get__" and owner not in _VALUES):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        logits = args[0] if args and isinstance(args[0], LazyLogits) else kwargs.get("input")
        if isinstance(logits, LazyLogits) and logits._value is None:
            if func is F.cross_entropy:
                answer = _loss(logits, *args[1:], **{k: v for k, v in kwargs.items() if k != "input"})
            else:
                answer = _noted(logits, func, name, args, kwargs)
            if answer is not None:
                return answer
        with torch._C.DisableTorchFunctionSubclass():
            args, kwargs = _computed(args, name), dict(_computed(kwargs, name))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:  # autograd detaches for a hook or a saved tensor
            return args[0]
        name = str(func)
        return func(*_computed(args, name), **_computed(kwargs or {}, name))


def lazy_linear(
    head: nn.Module,
    plain: Callable[[Tensor], Tensor],
    hidden: Tensor,
    options: Mapping[str, Any],
    report: Callable[[str, Tensor], None],
) -> LazyLogits:
    """The output of a linear head for hidden states, not computed yet.

    Args:
        head: the layer, with `weight` [vocabulary, features] and `bias`.
        plain: its own forward.
        hidden: [..., features].
        options: `backend` and `skip_ignored` of `linear_cross_entropy`.
        report: called with the name of an operation that forced the logits to be computed, and the logits.
    """
    kind = hidden.device.type
    cast, cast_dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    gradients = torch.is_grad_enabled()
    version = None if hidden.is_inference() else hidden._version

    def compute() -> Tensor:
        if version is not None and hidden._version != version:
            raise RuntimeError(
                "The hidden states were changed in place after the head saw them, and its logits were not computed "
                "yet; change a copy, or use the model without ChunkedLoss."
            )
        enabled = gradients and torch.is_grad_enabled()
        with torch.set_grad_enabled(enabled), torch.autocast(kind, dtype=cast_dtype, enabled=cast):
            return plain(hidden)

    recipe = LogitsRecipe(head=head, hidden=hidden, compute=compute, options=options, report=report)
    weight: Any = head.weight
    double = torch.float64 in (hidden.dtype, weight.dtype)
    dtype = cast_dtype if cast and not double else hidden.dtype
    return LazyLogits(recipe, torch.Size((*hidden.shape[:-1], weight.size(0))), dtype)


def _loss(
    logits: LazyLogits,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: Any = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """`F.cross_entropy` from the hidden states; None if they are not enough for the given options."""
    recipe = logits._recipe
    plain = weight is None and size_average is None and reduce is None
    rows = recipe.hidden.shape[:-1]
    flat = len(rows) < 2 or recipe.classes_second
    if not plain or not flat or target.is_floating_point() or target.shape != rows:
        return None
    if recipe.outer is not None and recipe.outer <= 0:
        return None
    options = {"ignore_index": ignore_index, "reduction": reduction, "label_smoothing": label_smoothing}
    return recipe.loss(target, **options)


def _noted(
    logits: LazyLogits, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> LazyLogits | None:
    """The lazy result of an operation on lazy logits; None if the operation can't be deferred."""
    recipe, dtype, shape = logits._recipe, logits.dtype, logits.shape
    others = args[1:]
    if name == "__getitem__":
        if recipe.classes_second or not _leaves_classes(others[0], logits.ndim):
            return None
        recipe = replace(recipe, hidden=recipe.hidden[others[0]])
        shape = torch.Size((*recipe.hidden.shape[:-1], shape[-1]))
    elif name in _SAME_ROWS or name in _CASTS or name in _TRANSPOSITIONS:
        if any(isinstance(value, Tensor) for value in (*others, *kwargs.values())):
            return None
        with unmetered():  # a meter would count the "meta" tensor
            like = func(torch.empty(shape, dtype=dtype, device="meta"), *others, **kwargs)
        if name in _TRANSPOSITIONS:
            if logits.ndim != 3 or like.shape != (shape[0], shape[2], shape[1]):
                return None
            recipe = replace(recipe, classes_second=not recipe.classes_second)
        elif name in _CASTS:
            if not like.is_floating_point() or not _stays(like, others, kwargs, logits.device):
                return None
        elif recipe.classes_second and name != "contiguous":
            return None
        elif name != "contiguous":
            if not like.ndim or like.shape[-1] != shape[-1] or like.dtype != dtype:
                return None
            features = recipe.hidden.size(-1)
            recipe = replace(recipe, hidden=recipe.hidden.reshape(*like.shape[:-1], features))
        shape, dtype = like.shape, like.dtype
    elif name in _PRODUCTS or name in _QUOTIENTS:
        factor = others[0] if len(others) == 1 and not kwargs else None
        if isinstance(factor, bool) or not isinstance(factor, (int, float)):
            return None
        if not math.isfinite(factor) or factor == 0:
            return None
        factor = 1 / factor if name in _QUOTIENTS else factor
        if recipe.outer is None:
            recipe = replace(recipe, inner=recipe.inner * factor)
        else:
            recipe = replace(recipe, outer=recipe.outer * factor)
    elif name == "detach":
        recipe = replace(recipe, hidden=recipe.hidden.detach(), detached=True)
    elif name == "tanh" and recipe.outer is None:
        recipe = replace(recipe, outer=1.0)
    else:
        return None
    before = logits

    def compute() -> Tensor:
        return func(before._recipe.compute(), *others, **kwargs)

    return LazyLogits(replace(recipe, compute=compute), shape, dtype)


def _stays(like: Tensor, others: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> bool:
    """Whether a cast stays on the device."""
    named = [value for value in (*others, *kwargs.values()) if isinstance(value, (str, torch.device))]
    return all(torch.device(value) == device for value in named)


def _leaves_classes(index: Any, dimensions: int) -> bool:
    """Whether an index keeps the last dimension whole."""
    items = list(index) if isinstance(index, tuple) else [index]
    if any(isinstance(item, (list, LazyLogits)) for item in items):
        return False
    whole = bool(items) and isinstance(items[-1], slice) and items[-1] == slice(None)
    if any(item is Ellipsis for item in items):
        return items[-1] is not Ellipsis and whole
    used = sum(_dimensions(item) for item in items)
    return used < dimensions or (used == dimensions and whole)


def _dimensions(item: Any) -> int:
    if item is None:
        return 0
    return item.ndim if isinstance(item, Tensor) and item.dtype in (torch.bool, torch.uint8) else 1


def _computed(item: Any, name: str) -> Any:
    """The same arguments with the computed logits."""
    if isinstance(item, LazyLogits):
        only_read = item.requires_grad and not torch.is_grad_enabled() and not name.endswith("_")
        if item._value is None and only_read:
            return item._recipe.compute()  # without a graph, so not kept for later operations
        if item._value is None:
            item._value = item._recipe.compute()
            item._recipe.report(name, item._value)
        return item._value
    if isinstance(item, dict):
        return {key: _computed(value, name) for key, value in item.items()}
    if isinstance(item, (tuple, list)):
        return type(item)(_computed(value, name) for value in item)
    return item


def _refuse_gradient(gradient: Tensor) -> None:
    raise RuntimeError(
        "A gradient reached logits that were never computed: they went into an autograd.Function, which hides them. "
        "Use the model without ChunkedLoss, or call linear_cross_entropy on its hidden states."
    )
