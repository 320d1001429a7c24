"""The plugins of the matrix: how each is built, where it can do something, and what its result is compared with."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

import lightning_memkit as memkit
from benchmarks._matrix_models import LENGTH, VOCABULARY, Model, models, rows_of

Place = Literal["cpu", "simulated device", "two ranks"]
Compared = Literal["whole", "halves", "documents"]
ROUNDING = 5e-4  # of the update: another order of sums, through AdamW
_DOCUMENT_LENGTHS = (60, 8, 33, 21, 47, 12, 30, 55, 18, 9, 40, 26)


@dataclass(frozen=True, kw_only=True)
class Column:
    """A plugin of the matrix.

    Args:
        name: of the plugin, with what is not its default.
        build: the plugin, of a model's name and a folder.
        place: where it can do something.
        most_update_error: how far the weights may be from plain float32 Lightning's, over how far those have moved.
        compared: what plain Lightning is given: the whole batches, their halves one after the other (where parts or
            ranks are weighed alike, or hold statistics of their own), or each document alone in a padded row.
        peer_precision: Lightning's precision that computes as the plugin does: weights may be a quarter further off.
    """

    name: str
    build: Callable[[Model, Path], Any]
    place: Place = "cpu"
    most_update_error: float = 0.0
    compared: Compared = "whole"
    peer_precision: str = ""

    def compared_for(self, model: Model) -> Compared:
        """For a model whose statistics are those of the samples beside each other, parts are the truth.

        Where halves weigh alike anyway, ranks that each have one come to the whole batch's result.
        """
        if self.name == "MemoryBudget" and model.has_batch_statistics:
            return "halves"
        return "whole" if self.compared == "halves" and model.halves_add_up else self.compared


def _callback(name: str, **options: Any) -> Callable[[Model, Path], Any]:
    return lambda model, folder: getattr(memkit, name)(**options, **model.options.get(name, {}))


def _budget(model: Model, folder: Path) -> Any:
    half = rows_of(model.batches()[0]) // 2
    return memkit.MemoryBudget("4GiB", micro_batch_size=half)


def _initial_weights(model: Model, folder: Path) -> Any:
    from safetensors.torch import save_model

    from lightning_memkit.plugins.callbacks.initial_weights import InitialWeights

    path = folder / "weights.safetensors"
    torch.manual_seed(0)
    save_model(model.module(), str(path))
    return InitialWeights(str(path))


COLUMNS = (
    Column(name="ActivationCheckpointing", build=_callback("ActivationCheckpointing")),
    Column(
        name="ActivationCheckpointing: selective",
        build=_callback("ActivationCheckpointing", policy="selective"),
    ),
    Column(
        name="ActivationCheckpointing: budget:0.5",
        build=_callback("ActivationCheckpointing", policy="budget:0.5"),
    ),
    Column(
        name="ActivationOffload",
        build=_callback("ActivationOffload", min_bytes=1),
        place="simulated device",
        most_update_error=ROUNDING,
    ),
    Column(name="ChunkedLoss", build=_callback("ChunkedLoss"), most_update_error=ROUNDING),
    Column(name="ContaminationProbe", build=_callback("ContaminationProbe")),
    Column(
        name="FSDP2Strategy",
        build=_callback("FSDP2Strategy"),
        place="two ranks",
        most_update_error=ROUNDING,
        compared="halves",
    ),
    Column(name="GradientRelease", build=_callback("GradientRelease"), most_update_error=ROUNDING),
    Column(name="InitialWeights", build=_initial_weights),
    Column(name="LoaderTuner", build=_callback("LoaderTuner")),
    Column(name="MemoryBudget", build=_budget, most_update_error=ROUNDING),
    Column(name="MemoryReport", build=_callback("MemoryReport", live=False)),
    Column(name="OnDeviceStrategy", build=_callback("OnDeviceStrategy")),
    Column(
        name="OptimizerOffload",
        build=_callback("OptimizerOffload"),
        place="simulated device",
        most_update_error=ROUNDING,
    ),
    Column(
        name="PackedDataModule",
        build=lambda model, folder: memkit.PackedDataModule(
            {"train": documents()}, context=LENGTH, batch_size=16
        ),
        most_update_error=ROUNDING,
        compared="documents",
    ),
    Column(
        name="PureBF16Precision",
        build=_callback("PureBF16Precision"),
        most_update_error=0.02,
        peer_precision="bf16-true",
    ),
    Column(name="StreamingCheckpointIO", build=_callback("StreamingCheckpointIO")),
    Column(
        name="ZeRO1Strategy",
        build=_callback("ZeRO1Strategy"),
        place="two ranks",
        most_update_error=ROUNDING,
        compared="halves",
    ),
)


def cells() -> list[tuple[str, str]]:
    """Every model by every plugin; packing only where the model reads tokens."""
    return [
        (model.name, column.name)
        for model in models()
        for column in COLUMNS
        if column.name != "PackedDataModule" or model.packed is not None
    ]


def documents() -> list[list[int]]:
    """Token ids of twelve documents."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, VOCABULARY, (n,), generator=generator).tolist() for n in _DOCUMENT_LENGTHS]
