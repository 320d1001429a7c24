"""Distinguish running out of memory from every other error, and free what it left."""

import re

import torch

from lightning_memkit.utilities.garbage import collect_all

# Messages of allocators that raise a plain RuntimeError, in lower case. "Out of memory" alone is not enough:
# "ran out of memory-mapped files" is no failed allocation. cuSPARSE's errors come as descriptions, those of the other
# libraries by their names; tests ask the libraries that are installed.
_MESSAGES = re.compile(
    r"""
    \b(cuda|hip|xpu|mps\ backend|device)\ out\ of\ memory\b(?!-)
    | \berror(\ \[\w+\])?:\ out\ of\ memory\b(?!-)
    | \bout\ of\ memory[.:]?\ (you\ )?tried\ to\ allocate
    | \bcudaerrormemoryallocation\b | \bcuda_error_out_of_memory\b | \bhiperroroutofmemory\b
    | \b(ze|ur)_result_error_out_of_(device|host)_memory\b
    | \bcublas_status_(alloc_failed|not_initialized)\b
    | \bcudnn_status_(alloc_failed|internal_error_(device|host)_allocation_failed)\b
    | \b(cufft|hipfft)_alloc_failed\b
    | \b(cusolver|cusparse|hipblas|hipsolver|hipsparse|sparse)_status_alloc_failed\b
    | \berror:\ (insufficient\ resources|resource\ allocation\ failed)\ when\ calling\ `(cu|hip)sparse
    | \bnvrtc_error_out_of_memory\b
    | \b(cuda|hip)(host)?(malloc|alloc)\w*\ failed:\ out\ of\ memory\b(?!-)
    | \bcurand_status_allocation_failed\b | \bmiopenstatusallocfailed\b
    | \bdefaultcpuallocator:\ (can't\ allocate|not\ enough)\ memory\b
    """,
    re.VERBOSE,
)
# A failed collective may mention memory, but its peers have failed with it: never retry it.
_NEVER = ("nccl", "gloo")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that an allocation failed, on CUDA, ROCm, XPU, MPS or the host.

    Errors of collectives (NCCL, gloo) never count, whatever their text: other ranks can't retry from here.
    """
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    if not isinstance(error, RuntimeError) or type(error).__name__.startswith("Dist"):
        return False
    text = str(error).lower()
    return _MESSAGES.search(text) is not None and not any(word in text for word in _NEVER)


def free_memory() -> None:
    """Collect reference cycles and empty the accelerator's cache of freed memory.

    Call it after the handler of an error, not inside: there the traceback keeps the failed step's tensors
    alive.
    """
    collect_all()
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()
