"""What `tests.processes` imports once, in the process whose forks run: it starts no thread and runs no operator."""

import gc

import pytest  # noqa: F401
import torchmetrics  # noqa: F401

import lightning_memkit

for name in lightning_memkit.__all__:
    getattr(lightning_memkit, name)
gc.collect()
gc.freeze()  # the pages of what lives here stay shared
