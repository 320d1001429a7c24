"""Tell running out of memory from every other error."""

import torch

# Messages of allocators that raise a plain RuntimeError; lower case.
_MESSAGES = (
    "out of memory",
    "cublas_status_alloc_failed",
    "cublas_status_not_initialized",
    "cudnn_status_alloc_failed",
    "hipblas_status_alloc_failed",
    "miopenstatusallocfailed",
    "defaultcpuallocator: can't allocate memory",
    "defaultcpuallocator: not enough memory",
    "mps backend out of memory",
    "xpu out of memory",
)
# A collective that fails may name memory, but its peers are gone with it: never retried.
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
    return any(message in text for message in _MESSAGES) and not any(word in text for word in _NEVER)
