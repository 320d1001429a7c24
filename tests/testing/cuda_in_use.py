"""Stands for a process that has initialised CUDA: there torch's functions work, and in its forks they raise."""

import os
from typing import Any

import pytest
import torch

SAID = (
    "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must use the 'spawn' start "
    "method"
)
# What asks the driver for something, in torch 2.10 to 2.13: `torch.cuda._lazy_init` comes first.
_OF_THE_DRIVER = {
    "current_device": 0,
    "get_device_capability": (9, 0),
    "get_device_name": "NVIDIA H200",
    "get_rng_state_all": [],
    "get_per_process_memory_fraction": 1.0,
    "is_bf16_supported": True,
    "memory_allocated": 0,
    "max_memory_allocated": 0,
    "mem_get_info": (80 << 30, 80 << 30),
    "memory_reserved": 0,
    "memory_stats": {},
    "set_per_process_memory_fraction": None,
    "set_rng_state_all": None,
    "synchronize": None,
}


@pytest.fixture
def cuda_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA as torch's CUDA build shows it, once it was initialised in this process.

    As there, `is_available` and `device_count` go on saying what they said before a fork.
    """
    original = os.getpid()

    def asking(answer: Any) -> Any:
        def ask(*args: Any, **kwargs: Any) -> Any:
            if os.getpid() != original:
                raise RuntimeError(SAID)
            return answer

        return ask

    for name, answer in _OF_THE_DRIVER.items():
        monkeypatch.setattr(torch.cuda, name, asking(answer))
    monkeypatch.setattr(torch.cuda, "_lazy_init", asking(None))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: os.getpid() == original)
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda")
    )
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    monkeypatch.setattr(torch.accelerator, "synchronize", asking(None))
