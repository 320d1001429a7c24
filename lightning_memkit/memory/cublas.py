"""The workspaces that cuBLAS keeps on a GPU for good: one per thread, from torch's own allocator.

Source: `aten/src/ATen/cuda/CublasHandlePool.cpp` of torch 2.11 to 2.13. Each thread has a handle, and each
pair of handle and stream a workspace; forward and backward run in different threads, so training keeps two.
"""

import os
import re

import torch

WORKSPACE_BYTES = (2 * 4096 + 8 * 16) * 1024
WORKSPACE_BYTES_HOPPER = 8 * 4096 * 1024
WORKSPACE_BYTES_MI300 = 128 * 1024 * 1024  # torch's default for gfx94x
_THREADS = 2  # the forward's, and autograd's thread for the device
_CONFIG = "CUBLAS_WORKSPACE_CONFIG"


def cublas_bytes(device: torch.device) -> int:
    """What training keeps on a CUDA device for matrix products, within torch's allocator; 0 elsewhere.

    ``CUBLAS_WORKSPACE_CONFIG`` is read as torch does: `:4096:2:16:8` means two buffers of 4,096 KiB and eight
    of 16. It counts one stream: whoever runs products on a second one takes a workspace more there, for each
    thread that does. The streams that memkit makes only copy.
    """
    if device.type != "cuda" or torch.version.hip is not None:
        return 0
    pieces = re.findall(r":(\d+):(\d+)", os.environ.get(_CONFIG, ""))
    if pieces:
        return _THREADS * sum(int(kib) * 1024 * int(count) for kib, count in pieces)
    is_hopper = torch.get_device_module(device).get_device_capability(device)[0] == 9
    return _THREADS * (WORKSPACE_BYTES_HOPPER if is_hopper else WORKSPACE_BYTES)
