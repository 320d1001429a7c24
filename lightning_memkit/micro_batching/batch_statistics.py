"""Finds the modules that normalize with statistics of the batch, or keep averages of what they normalize."""

from torch import nn


def with_batch_statistics(module: nn.Module) -> list[str]:
    """The names of the modules in training mode that normalize with statistics of the batch."""
    norm = nn.modules.batchnorm._BatchNorm
    return [name for name, child in module.named_modules() if isinstance(child, norm) and child.training]


def with_running_averages(module: nn.Module) -> list[str]:
    """The names of the modules in training mode that normalize each row by itself, and average over batches beside."""
    norms = nn.modules.batchnorm
    return [
        name
        for name, child in module.named_modules()
        if isinstance(child, norms._NormBase)
        and not isinstance(child, norms._BatchNorm)
        and child.training
        and child.track_running_stats
    ]
