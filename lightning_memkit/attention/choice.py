"""Chooses the backend: the first that can run, or the reason why a named one can't."""

from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec

import torch
from torch import Tensor

from lightning_memkit.attention.documents import Documents
from lightning_memkit.attention.kernels import varlen_knows_windows
from lightning_memkit.utilities.errors import MissingPackageError

_ORDER = ("flash_attn", "varlen", "flex", "loop")
_NO_DOCUMENTS = Documents(cu_seqlens=torch.zeros(1, dtype=torch.int32))
_LARGEST_HEAD = 256
# A `flash_attn` without this function is FlashAttention-4 alone.
_CALLED = {"flash_attn": "flash_attn_varlen_func"}


def choose(query: Tensor, value: Tensor | None = None, documents: Documents = _NO_DOCUMENTS) -> str:
    """The first backend that can run on these tensors."""
    value = query if value is None else value
    return next(name for name in _ORDER if refusal(name, query, value, documents) is None)


def refusal(backend: str, query: Tensor, value: Tensor, documents: Documents) -> Exception | None:
    """The error that says why a backend can't run on these tensors, or None."""
    if backend in ("loop", "dense_mask"):
        return None
    if backend == "flex":
        dtypes = (torch.float32, torch.bfloat16, torch.float16)
    else:
        dtypes = (torch.bfloat16, torch.float16)
    remedy = '"auto" takes what can, and "loop" runs everywhere.'
    if query.device.type != "cuda" or query.dtype not in dtypes or _capability(query.device) < (8, 0):
        needed = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        return ValueError(
            f"backend={backend!r} can't run on {query.dtype} on {query.device}; it needs {needed} on a CUDA "
            f"device of capability 8.0 or higher. {remedy}"
        )
    if (lacks := _lacking(backend, query, value, documents)) is not None:
        return ValueError(f"backend={backend!r} has no {lacks}. {remedy}")
    if backend == "flash_attn" and not _importable("flash_attn"):
        return MissingPackageError("flash-attn", "backend='flash_attn'", "flash")
    if backend == "varlen" and not _importable("torch.nn.attention.varlen"):
        return ValueError(f'backend="varlen" is not part of torch {torch.__version__}; take "auto".')
    if backend == "flex" and not _importable("triton"):
        return MissingPackageError("triton", "backend='flex'", "triton")
    return None


def _lacking(backend: str, query: Tensor, value: Tensor, documents: Documents) -> str | None:
    """The requested feature that a backend does not support, or None."""
    if backend in ("varlen", "flex") and documents.dropout_p:
        return f"dropout (dropout_p={documents.dropout_p})"
    if backend == "varlen" and documents.changes_scores:
        return "softcap and no alibi_slopes"
    if backend == "varlen" and documents.window is not None and not varlen_knows_windows():
        return f"window in torch {torch.__version__}"
    if backend != "flex" and max(query.size(-1), value.size(-1)) > _LARGEST_HEAD:
        return f"heads of {query.size(-1)} features; {_LARGEST_HEAD} is its largest"
    if backend != "flex" and query.size(-1) != value.size(-1):
        return f"values of {value.size(-1)} features beside queries of {query.size(-1)}"
    return None


def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def has_flash_attn() -> bool:
    """Whether the flash-attn package is installed, with its kernels for variable lengths."""
    return _importable("flash_attn")


@lru_cache
def _importable(module: str) -> bool:
    """Whether a module can be found and, if other packages use the same name, has the function that is called."""
    if find_spec(module) is None:
        return False
    if module not in _CALLED:
        return True
    try:
        return hasattr(import_module(module), _CALLED[module])
    except Exception:  # built for another torch: the loader of its library may raise anything
        return False
