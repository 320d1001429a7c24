"""One cell of the matrix: a model trained beside a plugin, in a process for CPUs, a simulated device, or two ranks."""

import os
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins import CheckpointIO, Precision
from lightning.pytorch.strategies import Strategy
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

import lightning_memkit
from benchmarks._matrix_columns import COLUMNS, Column, Compared, Place, documents
from benchmarks._matrix_models import LENGTH, STEPS, Model, halves, models

PACKAGE = str(Path(lightning_memkit.__file__).parent)


def run_cells(wanted: list[tuple[str, str]], folder: Path, precision: str = "") -> None:
    """Train each cell and write down what came of it, by number; called in a process of its own (or of each rank)."""
    known = {model.name: model for model in models()}
    columns = {column.name: column for column in COLUMNS}
    is_first = os.environ.get("RANK", "0") == "0"
    for number, (model, column) in enumerate(wanted):
        own = folder / str(number)
        own.mkdir(exist_ok=True)
        found = _outcome(lambda m=model, c=column, f=own: _trained(known[m], columns[c], f, precision))
        if is_first:
            torch.save(found, folder / f"{number}.pt")


def plain_weights(model: Model, compared: Compared, folder: Path, precision: str = "") -> dict[str, Any]:
    """What plain Lightning comes to, without any plugin, in float32 or another precision of its own."""
    return _outcome(lambda: _plain(model, compared, folder, precision))


def _outcome(train: Callable[[], dict[str, Tensor]]) -> dict[str, Any]:
    """Weights, or the error in one line; and the warnings that are memkit's own."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        try:
            found: dict[str, Any] = {"weights": train()}
        except Exception as error:
            frames = traceback.extract_tb(error.__traceback__)
            found = {
                "error": _line(str(error)),
                "kind": type(error).__name__,
                "is_ours": any(frame.filename.startswith(PACKAGE) for frame in frames[-2:]),
                "traceback": "".join(traceback.format_exception(error))[-3000:],
            }
    ours = [one for one in heard if str(one.filename).startswith(PACKAGE) or "memkit" in str(one.message)]
    found["warnings"] = list(dict.fromkeys(_line(str(one.message)) for one in ours))
    return found


def _line(text: str) -> str:
    return " ".join(text.split())


def _trained(model: Model, column: Column, folder: Path, precision: str) -> dict[str, Tensor]:
    torch.manual_seed(0)
    plugin = column.build(model, folder)
    torch.manual_seed(0)
    trainer: dict[str, Any] = {"precision": precision} if precision else {}
    if isinstance(plugin, pl.LightningDataModule):
        assert model.packed is not None
        return _fitted(model.packed(), folder, [], datamodule=plugin, max_epochs=STEPS, **trainer)
    batches = model.batches()
    if column.place == "two ranks":
        batches = [halves(batch)[int(os.environ["RANK"])] for batch in batches]
    return _fitted(
        model.module(), folder, [plugin], train_dataloaders=_Batches(batches), where=column.place, **trainer
    )


def _plain(model: Model, compared: Compared, folder: Path, precision: str) -> dict[str, Tensor]:
    torch.manual_seed(0)
    module, batches = model.module(), model.batches()
    trainer: dict[str, Any] = {"precision": precision} if precision else {}
    if compared == "documents":
        batches = [_padded(model)] * STEPS
    elif compared == "halves":
        batches = [half for batch in batches for half in halves(batch)]
        trainer["accumulate_grad_batches"] = 2
    return _fitted(module, folder, [], train_dataloaders=_Batches(batches), **trainer)


def _fitted(
    module: pl.LightningModule,
    folder: Path,
    plugins: list[Any],
    where: Place = "cpu",
    datamodule: Any = None,
    **options: Any,
) -> dict[str, Tensor]:
    """Train, save a checkpoint, and return the parameters whole, on the host, in float32."""
    fit = {"datamodule": datamodule, "train_dataloaders": options.pop("train_dataloaders", None)}
    trainer = pl.Trainer(
        max_epochs=options.pop("max_epochs", 1),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=folder,
        use_distributed_sampler=False,
        callbacks=[plugin for plugin in plugins if isinstance(plugin, pl.Callback)],
        plugins=[plugin for plugin in plugins if isinstance(plugin, (Precision, CheckpointIO))],
        **_device(where, plugins),
        **options,
    )
    trainer.fit(module, **fit)
    weights = {name: _whole(parameter) for name, parameter in module.named_parameters()}
    trainer.save_checkpoint(folder / "last.ckpt")
    if trainer.global_step < STEPS:
        raise RuntimeError(f"{trainer.global_step} optimizer steps were made, not {STEPS}.")
    return weights


class _Batches(DataLoader[Any]):
    """Batches as they are, one a step."""

    def __init__(self, batches: list[Any]) -> None:
        super().__init__(batches, batch_size=None, shuffle=False)  # pyright: ignore[reportArgumentType]


def _device(place: Place, plugins: list[Any]) -> dict[str, Any]:
    strategies = [plugin for plugin in plugins if isinstance(plugin, Strategy)]
    if place == "simulated device":
        from tests.plugins.fake_accelerator import on_fake_device

        return on_fake_device()
    devices = 2 if place == "two ranks" else 1
    return {"accelerator": "cpu", "devices": devices, "strategy": strategies[0] if strategies else "auto"}


def _whole(parameter: Tensor) -> Tensor:
    value = parameter.detach()
    value = value.full_tensor() if isinstance(value, DTensor) else value
    return value.to("cpu", torch.float32, copy=True)


def _padded(model: Model) -> dict[str, Any]:
    """Each document in a row of its own."""
    rows = documents()
    ids = torch.zeros(len(rows), LENGTH, dtype=torch.long)
    labels = torch.full_like(ids, -100)
    mask = torch.zeros_like(ids)
    for row, document in enumerate(rows):
        tokens = torch.tensor(document)
        ids[row, : len(document)], labels[row, 1 : len(document)], mask[row, : len(document)] = (
            tokens, tokens[1:], 1,
        )  # fmt: skip
    if model.name.startswith("CausalLM"):
        positions = torch.arange(LENGTH).expand(len(rows), LENGTH)
        return {"input_ids": ids, "labels": labels, "position_ids": positions, "cu_seqlens": None}
    batch = {"input_ids": ids, "labels": labels}
    return batch if model.name.startswith(("litgpt", "Mamba")) else {**batch, "attention_mask": mask}


def _teach_simulated_device() -> None:
    """What real accelerators have and the simulated one lacks: weights that stay tied when moved, and two kernels."""
    from torch._decomp.decompositions import lstm_impl

    def histc(values: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:
        counted = torch.histc(values.cpu().float(), bins, min, max)
        return counted.to(values.device, values.dtype)

    torch.__future__.set_swap_module_params_on_conversion(True)
    library = torch.library.Library("aten", "IMPL")
    library.impl("lstm.input", lstm_impl, "AutogradPrivateUse1")
    library.impl("histc", histc, "PrivateUse1")
    _LIBRARIES.append(library)


_LIBRARIES: list[torch.library.Library] = []  # forgotten, they take back what they taught


def main(place: str, cells_file: str, folder: str, precision: str) -> None:
    """Run the cells that a file names."""
    import json
    from contextlib import nullcontext

    from tests.testing.fake_device import fake_device

    torch.set_num_threads(1)
    wanted = [tuple(cell) for cell in json.loads(Path(cells_file).read_text(encoding="utf-8"))]
    with fake_device() if place == "simulated device" else nullcontext():
        if place == "simulated device":
            _teach_simulated_device()
        run_cells(wanted, Path(folder), precision)
    if place == "two ranks":
        from tests.plugins.ranks import leave

        leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
