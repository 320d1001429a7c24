import ctypes
import importlib.util
import os
from pathlib import Path

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
        RuntimeError(
            "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 139.81 GiB"
        ),
        RuntimeError("XPU out of memory, please use `empty_cache` to release all unoccupied cached memory."),
        RuntimeError("CUDA driver error: out of memory"),
        RuntimeError("HIP error: out of memory"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 80 bytes."),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
        RuntimeError("cuFFT error: CUFFT_ALLOC_FAILED"),
        RuntimeError("cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`"),
        RuntimeError("CUDA error: CUSPARSE_STATUS_ALLOC_FAILED when calling `cusparseCreate(handle)`"),
        RuntimeError("CUDA error: out of memory when calling `cusparseCreate(handle)`"),
        RuntimeError(
            "CUDA error: insufficient resources when calling `cusparseSpGEMM_workEstimation( handle, opA, opB, "
            "&alpha, matA, matB, &beta, matC, computeType, CUSPARSE_SPGEMM_DEFAULT, descr, &size, buffer)`"
        ),
        RuntimeError("HIP error: resource allocation failed when calling `hipsparseCreate(handle)`"),
        RuntimeError("MKL error: SPARSE_STATUS_ALLOC_FAILED when calling `mkl_sparse_optimize(descr)`"),
        RuntimeError("CUDA NVRTC error: NVRTC_ERROR_OUT_OF_MEMORY"),
        RuntimeError("cudaMalloc failed: out of memory"),
        RuntimeError("cudaMallocAsync failed: out of memory"),
        RuntimeError("hipMalloc failed: out of memory"),
        torch.AcceleratorError(
            "CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in its manual."
        ),
        RuntimeError("CUDA error: HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`"),
        RuntimeError("MIOpen Error: miopenStatusAllocFailed"),
    ],
)
def test_allocators_that_ran_dry(error: BaseException) -> None:
    assert is_out_of_memory(error)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("out of memory"),
        RuntimeError("shape mismatch"),
        RuntimeError("The reader ran out of memory-mapped files."),
        RuntimeError("Queue full: no slot left, out of memory handles"),
        RuntimeError("The model must not run out of memory; see the guide."),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
        RuntimeError("CUDA error: initialization error when calling `cusparseCreate(handle)`"),
        RuntimeError("CUDA error: kernel launch failure when calling `cusparseSpMM(handle)`"),
        RuntimeError("Scheduler error: insufficient resources for this job"),
        RuntimeError("CUDA error: too many resources requested for launch"),
        RuntimeError("The queue's resource allocation failed when calling `reserve`"),
        RuntimeError("CUDA NVRTC error: NVRTC_ERROR_COMPILATION"),
        RuntimeError("cudaMalloc failed: invalid argument"),
        RuntimeError("NVVM_ERROR_OUT_OF_MEMORY_MAPPED_FILES"),
        torch.AcceleratorError("CUDA error: device-side assert triggered"),
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


# The libraries themselves

FAILED = {  # file, function that words an error, and how torch or an extension wraps it, by allocations that failed
    "libcudart.so*": ("cudaGetErrorString", {2: "CUDA error: {}", 1: None, 700: None, 701: None, 719: None}),
    "libcusparse.so*": (
        "cusparseGetErrorString",
        {code: "CUDA error: {} when calling `cusparseSpMM(handle)`" for code in (2, 11)}
        | dict.fromkeys((1, 3, 4, 5, 6, 7, 8, 9, 10)),
    ),
    "libnvrtc.so*": ("nvrtcGetErrorString", {1: "CUDA NVRTC error: {}", 2: None, 6: None, 11: None}),
}


@pytest.mark.parametrize("name", FAILED)
def test_the_words_of_an_installed_library_are_known(name):
    found = [
        path
        for folder in getattr(importlib.util.find_spec("nvidia"), "submodule_search_locations", None) or ()
        for path in Path(folder).glob(f"*/lib/{name}")
    ]
    if not found:
        pytest.skip(f"{name} is not installed")
    function, codes = FAILED[name]
    worded = getattr(ctypes.CDLL(str(found[0]), mode=os.RTLD_LAZY), function)
    worded.restype = ctypes.c_char_p
    for code, wrapped in codes.items():
        text = worded(code).decode()
        error = RuntimeError((wrapped or "CUDA error: {} when calling `cusparseSpMM(handle)`").format(text))
        assert is_out_of_memory(error) == (wrapped is not None), error
