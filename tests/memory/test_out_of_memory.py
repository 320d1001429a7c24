import pytest
import torch

from lightning_memkit.memory.out_of_memory import is_out_of_memory


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("anything"),
        MemoryError(),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:118] DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("MPS backend out of memory (MPS allocated: 18 GB)"),
        RuntimeError("HIP out of memory. Tried to allocate 2.00 GiB"),
    ],
)
def test_allocators_that_ran_dry(error: BaseException) -> None:
    assert is_out_of_memory(error)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("out of memory"),
        RuntimeError("shape mismatch"),
        RuntimeError("NCCL error: unhandled cuda error, out of memory"),
        KeyboardInterrupt(),
    ],
)
def test_everything_else(error: BaseException) -> None:
    assert not is_out_of_memory(error)


def test_the_host_s_own_refusal_counts() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60)
    assert is_out_of_memory(caught.value)
