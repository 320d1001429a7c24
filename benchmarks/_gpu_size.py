"""How large the rows of `python -m benchmarks.gpu` are: full, quick, or tiny for a run on the CPU."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from benchmarks._gpu_rows import Limit
from benchmarks.harness import Options, Ratio, Step, paired_ratio_within


@dataclass(frozen=True, kw_only=True)
class DecoderSize:
    """A decoder and its batch; 22 layers of width 2,048 are 1.1 billion parameters."""

    width: int = 2048
    heads: int = 16
    depth: int = 22
    rows: int = 2
    length: int = 4096
    min_bytes: int = 1 << 20


@dataclass(frozen=True, kw_only=True)
class GpuSize:
    """What the rows of all benchmarks measure.

    Attributes:
        decoder: of activation checkpointing, activation offload and optimizer offload.
        optimizer_layers: of the decoder whose parameters optimizers step.
        optimizer_width: of the same.
        host_parameters: parameters of the step that computes next to nothing.
        vocabularies: of the loss head.
        loss_tokens: tokens of the loss head.
        loss_features: width of its hidden states.
        attention: documents and tokens of each packed batch.
        models: how many of prediction's models, in their order.
        model_scale: how many times as wide and long as on the CPU those are.
        llamas: the shapes of Llama that are predicted and trained end to end.
        length: tokens in a sample of those.
        budget_scale: how many times as wide the models under a budget are.
        budget_models: how many of them.
        budget_rows: samples of their effective batch.
        seconds: that the pairs of a timed row take.
        is_tiny: for the CPU, where figures mean nothing: no limit applies.
    """

    decoder: DecoderSize = DecoderSize()
    optimizer_layers: int = 22
    optimizer_width: int = 2048
    host_parameters: int = 201
    vocabularies: tuple[int, ...] = (32_000, 128_000)
    loss_tokens: int = 8192
    loss_features: int = 4096
    attention: tuple[tuple[int, int], ...] = ((8, 2048), (32, 8192))
    models: int = 22
    model_scale: int = 8
    llamas: tuple[str, ...] = ("1b", "8b")
    length: int = 2048
    budget_scale: int = 8
    budget_models: int = 3
    budget_rows: int = 24
    seconds: float = 3.0
    is_tiny: bool = False

    @classmethod
    def tiny(cls) -> "GpuSize":
        """Small enough that every row takes seconds on one CPU thread."""
        return cls(
            decoder=DecoderSize(width=32, heads=2, depth=4, rows=2, length=32, min_bytes=1024),
            optimizer_layers=1,
            optimizer_width=64,
            host_parameters=11,
            vocabularies=(512, 1024),
            loss_tokens=256,
            loss_features=32,
            attention=((3, 128),),
            models=2,
            model_scale=1,
            llamas=("tiny",),
            length=32,
            budget_scale=1,
            budget_models=1,
            budget_rows=4,
            seconds=0.1,
            is_tiny=True,
        )

    @classmethod
    def quick(cls) -> "GpuSize":
        """The same rows, fewer and smaller."""
        return cls(
            decoder=DecoderSize(depth=6),
            optimizer_layers=8,
            vocabularies=(32_000,),
            attention=((8, 2048),),
            models=4,
            llamas=("1b",),
            budget_models=1,
            seconds=1.5,
        )

    @classmethod
    def for_device(cls, device: torch.device, *, quick: bool = False) -> "GpuSize":
        """Tiny on the CPU, else full or quick."""
        if device.type == "cpu":
            return cls.tiny()
        return cls.quick() if quick else cls()

    @classmethod
    def of(cls, options: Options) -> "GpuSize":
        """The size that the command line asks for."""
        return cls.for_device(torch.device(options.device), quick=options.quick)

    def limits(self, limits: Mapping[str, Limit]) -> Mapping[str, Limit]:
        """The same limits, or none where figures mean nothing."""
        return {} if self.is_tiny else limits

    def needs(self, seconds: float) -> float:
        """What a timed row needs here that needs so many seconds at full size: pairs are most of it."""
        return seconds * (0.4 + 0.2 * self.seconds)

    def ratio(self, ours: Step, peer: Step, options: Options) -> Ratio:
        """Time `ours` against `peer`, in as many pairs as this size has time for."""
        return paired_ratio_within(ours, peer, seconds=self.seconds, seed=options.seed)
