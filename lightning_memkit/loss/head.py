"""Cross-entropy of a linear head directly from hidden states: the logits never exist as a whole.

This is the entry; `chunks` does the arithmetic, `head_function` defines the autograd function, `backends`
wraps the kernels of other packages.
"""

from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from lightning_memkit.loss.backends import Backend, choose, refuse_skipping
from lightning_memkit.loss.chunks import HeadTerms
from lightning_memkit.loss.head_function import ChunkPlan, LinearCrossEntropy
from lightning_memkit.memory.units import parse_bytes
from lightning_memkit.utilities.tensors import is_wrapper

IGNORED_LABEL = -100
Reduction = Literal["mean", "sum", "none"]


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    reduction: Reduction = "mean",
    count: Tensor | float | None = None,
    shift: bool = False,
    ignore_index: int = IGNORED_LABEL,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    scale: float = 1.0,
    backend: Backend = "auto",
    chunk_bytes: int | str | None = None,
    skip_ignored: bool = True,
) -> Tensor:
    """The loss of `cross_entropy(linear(hidden, weight, bias).float(), labels)` without the logits in memory.

    Gradients are computed in the forward pass, chunk by chunk, and saved for backward. The price: bfloat16
    computes the logits twice (4 matrix products instead of 3). Float32 does so only if backward runs a second
    time (`retain_graph=True`). `reduction="none"` and float16 do so, too, because they compute gradients in
    backward. Ignored tokens take part in no product. Under `no_grad` only the losses are computed. A second
    derivative is refused.

    Args:
        hidden: [..., features].
        weight: [vocabulary, features], like `nn.Linear`'s. If it is frozen, its gradient is not computed.
        labels: int64 [...]: the class of each token, or `ignore_index`.
        bias: [vocabulary].
        reduction: `"mean"` over the labels that count, `"sum"`, or `"none"`: one loss a token, like `labels`.
        count: for `"mean"`: divide by this instead of by the number of labels that count here, such as by the
            number in all micro-batches of a batch; then the micro-batches' losses add up to the batch's.
        shift: compare token t with label t + 1 along the last dimension, as causal language models do; the
            last token of a row has no label.
        ignore_index: the label of tokens that don't count.
        label_smoothing: fraction of the target that is spread over the vocabulary.
        z_loss: adds this times the squared logarithm of the softmax's denominator to each token's loss
            (Chowdhery et al. 2022, arXiv:2204.02311; there 1e-4).
        softcap: bounds logits as `softcap * tanh(logits / softcap)` (Gemma Team 2024, arXiv:2408.00118).
        scale: multiplies the logits, before the cap.
        backend: `"memkit"` runs everywhere. `"torch"` (2.13's own), `"liger"` and `"cut_cross_entropy"` are
            first tested on a small problem on this device; one that is named is used, or refused with an
            error. `"auto"` takes, on CUDA, the first of cut_cross_entropy and liger that is installed and
            right, else memkit.
        chunk_bytes: size of the logit buffers, such as `"64MiB"`; None: a third of the weight's size in
            float32, at least 32 MiB. For `"memkit"` only.
        skip_ignored: False: tokens that don't count take part in the products, with weight 0, and the host does
            not wait for a GPU: for batches where few are ignored. On a GPU a label outside the vocabulary is then
            an assertion of the device. For `"memkit"` only, which `"auto"` then takes.

    Returns:
        The loss in float32 (float64 for float64); NaN for the mean over no labels, as in torch.

    Raises:
        ValueError: shapes, dtypes or options don't fit; a tensor is sharded; the backend is wrong here.
        IndexError: a label lies outside the vocabulary.
        MissingPackageError: the backend's package is absent.

    Source: chunks with gradients in the forward pass, Hsu et al. 2024, arXiv:2410.10989.
    """
    terms = HeadTerms(label_smoothing=label_smoothing, z_loss=z_loss, softcap=softcap, scale=scale)
    _check(hidden, weight, labels, bias)
    _check_options(reduction, count, backend, skips=skip_ignored)
    if shift and labels.ndim == 0:
        raise ValueError(
            "shift=True with a single label: it has no next one; pass rows of tokens, or shift=False."
        )
    targets = _shifted(labels, ignore_index) if shift else labels
    flat = targets.reshape(-1)
    rows, kept, tokens = _counted(flat, ignore_index, weight.size(0), skips=skip_ignored)
    plan = ChunkPlan(
        terms=terms,
        dtype=_product_dtype(hidden, weight, bias),
        by_token=reduction == "none",
        chunk_bytes=None if chunk_bytes is None else parse_bytes(chunk_bytes),
        gradients=torch.is_grad_enabled(),
    )
    divisor = tokens if reduction == "mean" and count is None else 1 if count is None else count
    kernel = None
    if skip_ignored and tokens and not isinstance(hidden, FakeTensor):
        kernel = choose(backend, "none" if plan.by_token else "sum", hidden, plan.dtype, terms)
    states = hidden.reshape(-1, hidden.size(-1))
    if kernel is None:
        loss: Any = LinearCrossEntropy.apply(states, weight, bias, kept, rows, divisor, plan)
    else:
        states = states if rows is None else states.index_select(0, rows)
        cast = None if bias is None else bias.to(plan.dtype)
        summed = "none" if plan.by_token else "sum"
        losses = kernel(states.to(plan.dtype), weight.to(plan.dtype), cast, kept, summed)
        loss = losses if plan.by_token else losses / divisor
    if not plan.by_token:
        return loss
    if skip_ignored and rows is not None:
        loss = loss.new_zeros(flat.numel()).index_copy(0, rows, loss)
    return loss.view(labels.shape)


def _shifted(labels: Tensor, ignore_index: int) -> Tensor:
    shifted = torch.full_like(labels, ignore_index)
    shifted[..., :-1] = labels[..., 1:]
    return shifted


def _counted(
    labels: Tensor, ignore_index: int, vocabulary: int, *, skips: bool
) -> tuple[Tensor | None, Tensor, Tensor | int]:
    """The rows that count and their labels; or a mask, and all labels with 0 for those that don't; how many count."""
    rows = _counted_rows(labels, ignore_index, vocabulary) if skips or labels.device.type == "cpu" else None
    if skips:
        kept = labels if rows is None else labels[rows]
        return rows, kept.long(), kept.numel()
    counts = labels != ignore_index
    return counts, torch.where(counts, labels, 0).long(), counts.sum()


def _counted_rows(labels: Tensor, ignore_index: int, vocabulary: int) -> Tensor | None:
    """The rows whose labels count; None if all do. Waits for the device once, as their number is a shape."""
    if isinstance(labels, FakeTensor) or labels.is_meta or not labels.numel():
        return None  # no values to read: assume that all tokens count, which takes the most memory
    counts = labels != ignore_index
    known = torch.where(counts, labels, 0).long()  # those that don't count are within bounds
    count, low, high = torch.stack([counts.sum(), *known.aminmax()]).tolist()
    if count and (low < 0 or high >= vocabulary):
        raise IndexError(
            f"Label {low if low < 0 else high} is out of bounds: labels run from 0 to {vocabulary - 1}, one for "
            f"each row of the weight; tokens that don't count have ignore_index={ignore_index}."
        )
    if count == labels.numel():
        return None
    # Of a known length, unlike nonzero's; in order.
    return counts.byte().argsort(descending=True, stable=True)[:count]


def _product_dtype(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> torch.dtype:
    """Autocast's dtype if it is enabled, as for `F.linear`; otherwise the dtype that all tensors share."""
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind) and torch.float64 not in (hidden.dtype, weight.dtype):
        return torch.get_autocast_dtype(kind)
    dtypes = {tensor.dtype for tensor in (hidden, weight, bias) if tensor is not None}
    if len(dtypes) > 1 or not hidden.is_floating_point():
        raise ValueError(
            f"hidden is {hidden.dtype}, weight {weight.dtype}"
            + (f", bias {bias.dtype}" if bias is not None else "")
            + "; outside of autocast they have one floating dtype: cast one of them, such as "
            "hidden.to(weight.dtype). A quantised head can't be used."
        )
    return hidden.dtype


def _check(hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None) -> None:
    for name, tensor in (("hidden", hidden), ("weight", weight), ("labels", labels), ("bias", bias)):
        if tensor is not None and is_wrapper(tensor):
            raise ValueError(
                f"{name} is a {type(tensor).__name__}, which can't be split into chunks; pass plain tensors. With "
                "FSDP2 leave the head in the root's group (no fully_shard of its own), or shard it with "
                "reshard_after_forward=False and call it in the forward; with tensor parallelism gather it first: "
                f"{name}.full_tensor()."
            )
    if weight.untyped_storage().nbytes() == 0 < weight.numel() and not weight.is_meta:
        raise ValueError(
            "The weight's memory has been freed: FSDP has sharded it again after the head's forward. Leave the head "
            "in the root's group, or shard it with reshard_after_forward=False."
        )
    if weight.ndim != 2 or hidden.ndim < 1 or hidden.size(-1) != weight.size(-1):
        raise ValueError(
            f"hidden {tuple(hidden.shape)} and weight {tuple(weight.shape)} don't fit: they are [..., features] and "
            "[vocabulary, features]. A flat or empty weight is one that FSDP has sharded: call this within the "
            "forward of the module that holds it."
        )
    if labels.shape != hidden.shape[:-1]:
        raise ValueError(
            f"labels {tuple(labels.shape)} don't fit hidden {tuple(hidden.shape)}: there is one for every "
            f"token, {tuple(hidden.shape[:-1])}. For causal models pass both whole, with shift=True."
        )
    if labels.is_floating_point() or labels.is_complex() or labels.dtype is torch.bool:
        raise ValueError(
            f"labels are {labels.dtype}; they are class indices, int64. For probabilities use F.cross_entropy."
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(
            f"bias {tuple(bias.shape)} doesn't fit {weight.size(0)} classes: one value for each."
        )


def _check_options(reduction: str, count: Any, backend: str, *, skips: bool) -> None:
    if reduction not in get_args(Reduction):
        raise ValueError(f"reduction={reduction!r} is unknown; choose one of {get_args(Reduction)}.")
    if count is not None and reduction != "mean":
        raise ValueError(
            f"count={count} with reduction={reduction!r}: only a mean is divided by it; leave one out."
        )
    wrong = count.numel() != 1 if isinstance(count, Tensor) else count is not None and not count > 0
    if wrong:
        raise ValueError(
            f"count={count} divides no loss: it is one number above 0, of the labels in all micro-batches."
        )
    if backend not in get_args(Backend):
        raise ValueError(f"backend={backend!r} is unknown; choose one of {get_args(Backend)}.")
    refuse_skipping(backend, skips=skips)
