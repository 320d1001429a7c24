"""Fused linear cross-entropy kernels of other packages; each is used only after it was right on a small problem.

The proof compares loss and gradients of one problem, in the requested dtype, on the requested device and with
the requested options, against float64. A kernel may be as far off as the plain computation in that dtype,
plus `TOLERANCE`.
"""

import warnings
from collections.abc import Callable
from functools import lru_cache
from importlib.util import find_spec
from inspect import signature
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_memkit.loss.chunks import HeadTerms
from lightning_memkit.memory.out_of_memory import is_out_of_memory
from lightning_memkit.utilities.errors import MissingPackageError

Backend = Literal["auto", "memkit", "torch", "liger", "cut_cross_entropy"]
Kernel = Callable[[Tensor, Tensor, Tensor | None, Tensor, str], Tensor]

# How much farther from float64 than the plain computation a kernel may be, relative to the norm of the
# result.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 1e-3, torch.float16: 2e-4}
_SUPPORTED = {
    "torch": ("label_smoothing",),
    "liger": ("label_smoothing", "z_loss", "softcap"),
    "cut_cross_entropy": ("softcap",),
}
_PROOF_TOKENS, _PROOF_FEATURES, _PROOF_VOCABULARY = 192, 64, 1000


def choose(
    backend: Backend, reduction: str, like: Tensor, dtype: torch.dtype, terms: HeadTerms
) -> Kernel | None:
    """The kernel to use on tensors like this one, in this dtype; None for memkit's own.

    Raises:
        ValueError: the named backend does not support the options, or is wrong here.
        MissingPackageError: its package is absent.
    """
    if backend == "memkit":
        return None
    if backend == "auto":
        name = _automatic(reduction, like.device, dtype, terms) if like.device.type == "cuda" else None
        return None if name is None else _kernel(name, terms)
    refusal = _refusal(backend, terms) or _disproof(backend, reduction, like.device, dtype, terms)
    if isinstance(refusal, Exception):
        raise refusal
    if refusal:
        raise ValueError(f'backend="{backend}" is wrong here: {refusal} Use backend="auto" or "memkit".')
    return _kernel(backend, terms)


def refuse_skipping(backend: str, *, skips: bool) -> None:
    """Raise for a kernel of another package that is not to skip ignored tokens: it decides that by itself."""
    if not skips and backend not in ("auto", "memkit"):
        raise ValueError(
            f'skip_ignored=False with backend="{backend}": this kernel decides by itself, and may wait for the '
            'device; use backend="memkit", or leave skip_ignored out.'
        )


@lru_cache
def _automatic(reduction: str, device: torch.device, dtype: torch.dtype, terms: HeadTerms) -> str | None:
    """The first kernel that is installed, supports the options and is right; warns once of one that is wrong."""
    for name in ("cut_cross_entropy", "liger"):
        if _refusal(name, terms) is not None:
            continue
        wrong = _disproof(name, reduction, device, dtype, terms)
        if not wrong:
            return name
        warnings.warn(f"The loss kernel of {name} is installed but not used: {wrong}", stacklevel=4)
    return None


def _refusal(name: str, terms: HeadTerms) -> Exception | None:
    """The error for a backend that can't be used at all, or None."""
    plain = HeadTerms()
    used = [option for option in vars(terms) if getattr(terms, option) != getattr(plain, option)]
    unknown = [option for option in used if option not in _SUPPORTED[name]]
    if unknown:
        return ValueError(
            f'backend="{name}" knows no {", ".join(unknown)}; leave it out, or use backend="auto" or "memkit".'
        )
    if name == "torch" and not hasattr(F, "linear_cross_entropy"):
        return ValueError(
            f'backend="torch" needs F.linear_cross_entropy, which torch {torch.__version__} lacks (2.13 has it); '
            'use backend="auto" or "memkit".'
        )
    if name == "liger" and not _importable("liger_kernel"):
        return MissingPackageError("liger-kernel", 'backend="liger"', "liger")
    if name == "cut_cross_entropy" and not _importable("cut_cross_entropy"):
        return MissingPackageError("cut-cross-entropy", 'backend="cut_cross_entropy"', "cce")
    return None


@lru_cache
def _importable(module: str) -> bool:
    return find_spec(module) is not None


def _kernel(name: str, terms: HeadTerms) -> Kernel:
    return {"torch": _torch, "liger": _liger, "cut_cross_entropy": _cut_cross_entropy}[name](terms)


def _torch(terms: HeadTerms) -> Kernel:
    options: Any = {"label_smoothing": terms.label_smoothing, "options": torch.nn.LinearCrossEntropyOptions()}

    def kernel(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, reduction: str) -> Tensor:
        function: Any = F.linear_cross_entropy
        return function(hidden, weight, labels, linear_bias=bias, reduction=reduction, **options)

    return kernel


def _liger(terms: HeadTerms) -> Kernel:
    """https://github.com/linkedin/Liger-Kernel; the weight's gradient is summed in float32, where it offers that.

    By itself it sums them in the weight's dtype: in bfloat16 that was twice as far from float64 as the plain
    computation (H200, 0.8.5).
    """

    def kernel(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, reduction: str) -> Tensor:
        from liger_kernel.transformers import functional  # pyright: ignore[reportMissingImports]

        return functional.liger_fused_linear_cross_entropy(
            hidden,
            weight,
            labels,
            bias=bias,
            lse_square_scale=terms.z_loss,
            label_smoothing=terms.label_smoothing,
            softcap=terms.softcap,
            reduction=reduction,
            **_sums_in_float32(functional.liger_fused_linear_cross_entropy),
        )

    return kernel


def _sums_in_float32(function: Callable[..., Any]) -> dict[str, torch.dtype]:
    return {"accum_dtype": torch.float32} if "accum_dtype" in signature(function).parameters else {}


def _cut_cross_entropy(terms: HeadTerms) -> Kernel:
    """https://github.com/apple/ml-cross-entropy, without its filter of small gradients; not yet verified on a GPU."""

    def kernel(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, reduction: str) -> Tensor:
        from cut_cross_entropy import linear_cross_entropy  # pyright: ignore[reportMissingImports]

        return linear_cross_entropy(
            hidden, weight, labels, bias=bias, softcap=terms.softcap, reduction=reduction, impl="cce_exact"
        )

    return kernel


@lru_cache
def _disproof(
    name: str, reduction: str, device: torch.device, dtype: torch.dtype, terms: HeadTerms
) -> str | None:
    """The error in a kernel's loss or gradients, as a sentence; None if they are right."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(_PROOF_TOKENS, _PROOF_FEATURES, generator=generator)
    weight = torch.randn(_PROOF_VOCABULARY, _PROOF_FEATURES, generator=generator) / 8
    labels = torch.randint(_PROOF_VOCABULARY, (_PROOF_TOKENS,), generator=generator).to(device)
    given = tuple(tensor.to(device, dtype) for tensor in (hidden, weight))
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast(device.type, enabled=False):
        truth = _evaluated(_plain(terms), [x.double() for x in given], labels, reduction)
        plain = _evaluated(_plain(terms), given, labels, reduction)
        try:
            found = _evaluated(_kernel(name, terms), given, labels, reduction)
        except Exception as error:  # whatever a third party's kernel raises: a kernel that fails is not right
            if is_out_of_memory(error):  # says nothing about the kernel: it is proven at the next call
                raise
            return f"it failed on a small problem in {dtype} on {device} ({type(error).__name__}: {error})."
    for what, value, usual, true in zip(("loss", "hidden's", "weight's"), found, plain, truth, strict=True):
        error, allowed = _distance(value, true), _distance(usual, true) + TOLERANCE[dtype]
        if not error <= allowed:
            subject = "loss" if what == "loss" else f"{what} gradient"
            return (
                f"on a small problem in {dtype} on {device} its {subject} was off by {error:.2g} against float64, "
                f"where {allowed:.2g} is allowed (the plain computation's error and {TOLERANCE[dtype]:g})."
            )
    return None


def _plain(terms: HeadTerms) -> Kernel:
    """The computation by definition, with all logits."""

    def kernel(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, reduction: str) -> Tensor:
        logits = F.linear(hidden, weight, bias)
        logits = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
        logits = logits * terms.scale
        if terms.softcap is not None:
            logits = terms.softcap * torch.tanh(logits / terms.softcap)
        losses = F.cross_entropy(logits, labels, reduction="none", label_smoothing=terms.label_smoothing)
        losses = losses + terms.z_loss * logits.logsumexp(1).square()
        return losses if reduction == "none" else losses.sum()

    return kernel


def _evaluated(kernel: Kernel, given: Any, labels: Tensor, reduction: str) -> tuple[Tensor, ...]:
    """The loss, and the gradients for upstream factors other than 1."""
    hidden, weight = (tensor.detach().clone().requires_grad_() for tensor in given)
    loss = kernel(hidden, weight, None, labels, reduction)
    steps = torch.linspace(0.5, 1.5, loss.numel(), device=loss.device, dtype=loss.dtype).view(loss.shape)
    (steps * loss).sum().backward()
    return loss.detach(), hidden.grad, weight.grad  # pyright: ignore[reportReturnType]


def _distance(value: Tensor, truth: Tensor) -> float:
    return float((value.double() - truth).norm() / truth.norm())
