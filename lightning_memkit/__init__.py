"""Train in the memory one has: PyTorch Lightning plugins and the plain-torch cores behind them.

Every public name is loaded on first use: importing the package loads neither Lightning nor CUDA.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_memkit.utilities.garbage import without_collecting

__version__ = "0.2.0"

_HOME = {
    "ActivationCheckpointing": "plugins.callbacks.activation_checkpointing",
    "ActivationOffload": "plugins.callbacks.activation_offload",
    "Budget": "planning.budget",
    "ChunkedLoss": "plugins.callbacks.chunked_loss",
    "ContaminationProbe": "plugins.callbacks.contamination",
    "FSDP2Strategy": "plugins.strategies.fsdp2",
    "GradientRelease": "plugins.callbacks.gradient_release",
    "InitialWeights": "plugins.callbacks.initial_weights",
    "LoaderTuner": "plugins.data.loader_tuner",
    "LossPerplexity": "plugins.perplexity",
    "MemkitCLI": "plugins.cli.memkit_cli",
    "MemoryBudget": "plugins.memory_budget.callback",
    "MemoryReport": "plugins.memory_report.callback",
    "NoEffectWarning": "utilities.errors",
    "OnDeviceStrategy": "plugins.strategies.on_device",
    "OptimizerOffload": "plugins.callbacks.optimizer_offload",
    "PackedBatch": "data.batching.batch",
    "PackedDataModule": "plugins.data.packed_data",
    "Plan": "planning.plan",
    "PureBF16Precision": "plugins.precision.pure_bf16",
    "StreamingCheckpointIO": "plugins.strategies.checkpoint_io",
    "ZeRO1Strategy": "plugins.strategies.zero1",
    "checkpoint_chunks": "activations.chunks.checkpoint_chunks",
    "checkpoint_modules": "activations.checkpointing",
    "compensate": "optim.compensation",
    "linear_cross_entropy": "loss.head",
    "micro_batches": "micro_batching",
    "offload_activations": "activations.offload",
    "pack": "data.packing.pack",
    "packed_attention": "attention",
    "plan": "plugins.planning.planning",
    "predict_memory": "plugins.planning.prediction",
    "use_chunked_loss": "loss.switch",
    "use_packed_attention": "attention.adapters",
}

__all__ = sorted(_HOME)

if TYPE_CHECKING:
    from lightning_memkit.activations.checkpointing import checkpoint_modules as checkpoint_modules
    from lightning_memkit.activations.chunks.checkpoint_chunks import checkpoint_chunks as checkpoint_chunks
    from lightning_memkit.activations.offload import offload_activations as offload_activations
    from lightning_memkit.attention import packed_attention as packed_attention
    from lightning_memkit.attention.adapters import use_packed_attention as use_packed_attention
    from lightning_memkit.data.batching.batch import PackedBatch as PackedBatch
    from lightning_memkit.data.packing.pack import pack as pack
    from lightning_memkit.loss.head import linear_cross_entropy as linear_cross_entropy
    from lightning_memkit.loss.switch import use_chunked_loss as use_chunked_loss
    from lightning_memkit.micro_batching import micro_batches as micro_batches
    from lightning_memkit.optim.compensation import compensate as compensate
    from lightning_memkit.planning.budget import Budget as Budget
    from lightning_memkit.planning.plan import Plan as Plan
    from lightning_memkit.plugins.callbacks.activation_checkpointing import (
        ActivationCheckpointing as ActivationCheckpointing,
    )
    from lightning_memkit.plugins.callbacks.activation_offload import ActivationOffload as ActivationOffload
    from lightning_memkit.plugins.callbacks.chunked_loss import ChunkedLoss as ChunkedLoss
    from lightning_memkit.plugins.callbacks.contamination import ContaminationProbe as ContaminationProbe
    from lightning_memkit.plugins.callbacks.gradient_release import GradientRelease as GradientRelease
    from lightning_memkit.plugins.callbacks.initial_weights import InitialWeights as InitialWeights
    from lightning_memkit.plugins.callbacks.optimizer_offload import OptimizerOffload as OptimizerOffload
    from lightning_memkit.plugins.cli.memkit_cli import MemkitCLI as MemkitCLI
    from lightning_memkit.plugins.data.loader_tuner import LoaderTuner as LoaderTuner
    from lightning_memkit.plugins.data.packed_data import PackedDataModule as PackedDataModule
    from lightning_memkit.plugins.memory_budget.callback import MemoryBudget as MemoryBudget
    from lightning_memkit.plugins.memory_report.callback import MemoryReport as MemoryReport
    from lightning_memkit.plugins.perplexity import LossPerplexity as LossPerplexity
    from lightning_memkit.plugins.planning.planning import plan as plan
    from lightning_memkit.plugins.planning.prediction import predict_memory as predict_memory
    from lightning_memkit.plugins.precision.pure_bf16 import PureBF16Precision as PureBF16Precision
    from lightning_memkit.plugins.strategies.checkpoint_io import (
        StreamingCheckpointIO as StreamingCheckpointIO,
    )
    from lightning_memkit.plugins.strategies.fsdp2 import FSDP2Strategy as FSDP2Strategy
    from lightning_memkit.plugins.strategies.on_device import OnDeviceStrategy as OnDeviceStrategy
    from lightning_memkit.plugins.strategies.zero1 import ZeRO1Strategy as ZeRO1Strategy
    from lightning_memkit.utilities.errors import NoEffectWarning as NoEffectWarning


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(
            f"module {__name__!r} has no attribute {name!r}; public names: {', '.join(__all__)}."
        )
    with without_collecting():
        value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
