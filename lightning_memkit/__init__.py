"""Train in the memory one has: PyTorch Lightning plugins and the plain-torch cores behind them.

Every public name is loaded on first use: importing the package loads neither Lightning nor CUDA.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "ActivationCheckpointing": "plugins.activation_checkpointing",
    "ActivationOffload": "plugins.activation_offload",
    "Budget": "planning.budget",
    "ChunkedLoss": "plugins.chunked_loss",
    "ContaminationProbe": "plugins.contamination",
    "FSDP2Strategy": "plugins.fsdp2",
    "GradientRelease": "plugins.gradient_release",
    "InitialWeights": "plugins.initial_weights",
    "LoaderTuner": "plugins.loader_tuner",
    "LossPerplexity": "plugins.perplexity",
    "MemkitCLI": "plugins.cli",
    "MemoryBudget": "plugins.memory_budget",
    "MemoryReport": "plugins.memory_report",
    "NoEffectWarning": "utilities.errors",
    "OnDeviceStrategy": "plugins.strategies",
    "OptimizerOffload": "plugins.optimizer_offload",
    "PackedBatch": "data.batching.batch",
    "PackedDataModule": "plugins.packed_data",
    "Plan": "planning.plan",
    "PureBF16Precision": "plugins.precision",
    "StreamingCheckpointIO": "plugins.checkpoint_io",
    "ZeRO1Strategy": "plugins.zero1",
    "checkpoint_modules": "activations.checkpointing",
    "compensate": "optim.compensation",
    "linear_cross_entropy": "loss.head",
    "micro_batches": "micro_batching",
    "offload_activations": "activations.offload",
    "pack": "data.packing.pack",
    "packed_attention": "attention",
    "plan": "plugins.planning",
    "predict_memory": "plugins.prediction",
    "use_chunked_loss": "loss.switch",
    "use_packed_attention": "attention.adapters",
}

__all__ = sorted(_HOME)

if TYPE_CHECKING:
    from lightning_memkit.activations.checkpointing import checkpoint_modules as checkpoint_modules
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
    from lightning_memkit.plugins.activation_checkpointing import (
        ActivationCheckpointing as ActivationCheckpointing,
    )
    from lightning_memkit.plugins.activation_offload import ActivationOffload as ActivationOffload
    from lightning_memkit.plugins.checkpoint_io import StreamingCheckpointIO as StreamingCheckpointIO
    from lightning_memkit.plugins.chunked_loss import ChunkedLoss as ChunkedLoss
    from lightning_memkit.plugins.cli import MemkitCLI as MemkitCLI
    from lightning_memkit.plugins.contamination import ContaminationProbe as ContaminationProbe
    from lightning_memkit.plugins.fsdp2 import FSDP2Strategy as FSDP2Strategy
    from lightning_memkit.plugins.gradient_release import GradientRelease as GradientRelease
    from lightning_memkit.plugins.initial_weights import InitialWeights as InitialWeights
    from lightning_memkit.plugins.loader_tuner import LoaderTuner as LoaderTuner
    from lightning_memkit.plugins.memory_budget import MemoryBudget as MemoryBudget
    from lightning_memkit.plugins.memory_report import MemoryReport as MemoryReport
    from lightning_memkit.plugins.optimizer_offload import OptimizerOffload as OptimizerOffload
    from lightning_memkit.plugins.packed_data import PackedDataModule as PackedDataModule
    from lightning_memkit.plugins.perplexity import LossPerplexity as LossPerplexity
    from lightning_memkit.plugins.planning import plan as plan
    from lightning_memkit.plugins.precision import PureBF16Precision as PureBF16Precision
    from lightning_memkit.plugins.prediction import predict_memory as predict_memory
    from lightning_memkit.plugins.strategies import OnDeviceStrategy as OnDeviceStrategy
    from lightning_memkit.plugins.zero1 import ZeRO1Strategy as ZeRO1Strategy
    from lightning_memkit.utilities.errors import NoEffectWarning as NoEffectWarning


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(
            f"module {__name__!r} has no attribute {name!r}; public names: {', '.join(__all__)}."
        )
    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
