"""Warnings of Lightning and its loaders about toy runs, which say nothing about memkit."""

import pytest

NOISE = [
    pytest.mark.filterwarnings(f"ignore:{message}")
    for message in (
        ".*LeafSpec",  # Lightning 2.6.6 on torch 2.13
        ".*does not have many workers",
        ".*number of training batches",
        ".*have no .val_dataloader",
        ".*exists and is not empty",
        ".*litlogger",
        ".*`max_epochs` was not set",
    )
]
