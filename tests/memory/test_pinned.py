"""Pinned memory by powers of two, and without a device that it could be pinned for."""

import subprocess
import sys

import pytest
import torch

from lightning_memkit.memory.pinned import pinned_size, return_pinned

WITHOUT_A_DEVICE = """
import torch
from lightning_memkit.optim.offload import offload_states
assert not torch.accelerator.is_available()
optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.empty(3, device="meta"))])
offload_states(optimizer).undo()
"""


@pytest.mark.parametrize(
    ("size", "taken"), [(0, 0), (1, 1), (3, 4), (4096, 4096), (4097, 8192), (2**31 + 1, 2**32)]
)
def test_a_size_is_rounded_up_to_a_power_of_two(size, taken):
    assert pinned_size(size) == taken


@pytest.mark.long
def test_nothing_goes_back_where_there_is_no_accelerator():
    command = [sys.executable, "-c", WITHOUT_A_DEVICE]
    done = subprocess.run(command, env={"CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("has", "initialized", "asked"),
    [
        (("empty_host_cache", "_host_emptyCache"), True, ["empty_host_cache"]),
        (("_host_emptyCache",), True, ["_host_emptyCache"]),
        (("_host_emptyCache",), False, []),
        ((), True, []),
    ],
)
def test_older_torch_returns_pinned_memory_on_cuda(monkeypatch, has, initialized, asked):
    """torch 2.10 has no `empty_host_cache`; where CUDA is not in use, nothing is pinned, and asking would start it."""
    called = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: initialized)
    for owner, name in ((torch.accelerator, "empty_host_cache"), (torch._C, "_host_emptyCache")):
        if name in has:
            monkeypatch.setattr(owner, name, lambda name=name: called.append(name), raising=False)
        else:
            monkeypatch.delattr(owner, name, raising=False)
    return_pinned()
    assert called == asked
