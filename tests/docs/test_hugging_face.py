"""The page for those who come from transformers: flags and options exist, and no memory flag is missing."""

import inspect
import re
from dataclasses import fields
from importlib import import_module
from pathlib import Path

import lightning.pytorch as pl
import pytest

import lightning_memkit
from lightning_memkit.data.loading.batch_options import BatchOptions
from lightning_memkit.data.sources.shares import DocumentOptions

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "from-hugging-face.md").read_text(encoding="utf-8")
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in PAGE.splitlines()
    if line.startswith("| `")
]
# Parts of the names of flags that have to do with memory.
MEMORY = (
    "bf16 fp16 tf32 checkpointing accumulation batch_size batch_eval concat_batches gather_object loss_only optim "
    "average_tokens grad_norm smoothing empty_cache liger compile use_cache offload packing padding pad_ truncation "
    "max_length only_loss dataloader length sampling unused_columns num_input_tokens memory_metrics save_only jit "
    "fsdp deepspeed parallelism ddp_ accelerator_config model_init"
).split()


def flags() -> set[str]:
    """The names that the tables have in their first column, without the names of optimizers."""
    return {name for row in ROWS for name in re.findall(r"`(\w+)`", row[0])} - optimizers()


def optimizers() -> set[str]:
    from transformers.training_args import OptimizerNames

    return {name.value for name in OptimizerNames}


def known() -> set[str]:
    from transformers import TrainingArguments
    from trl.trainer.sft_config import SFTConfig

    return {field.name for kind in (TrainingArguments, SFTConfig) for field in fields(kind)}


def test_every_flag_of_the_page_is_one_of_the_installed_packages() -> None:
    assert len(ROWS) > 50
    assert not flags() - known()


def test_no_memory_flag_is_missing() -> None:
    about_memory = {name for name in known() if any(part in name for part in MEMORY)}
    assert len(about_memory) > 60
    named = set(re.findall(r"`(\w+)`", PAGE))
    assert not about_memory - named


def test_every_optimizer_of_the_installed_transformers_has_its_row() -> None:
    named = {name for row in ROWS for name in re.findall(r"`(\w+)`", row[0])}
    assert not optimizers() - named


@pytest.mark.parametrize(
    "path", sorted(set(re.findall(r"`((?:torch|bitsandbytes|transformers)\.[\w.]+\w)`", PAGE)))
)
def test_every_class_path_of_the_page_is_there(path: str) -> None:
    module, _, name = path.rpartition(".")
    assert inspect.isclass(getattr(import_module(module), name))


def test_every_option_of_the_page_is_there() -> None:
    trainer = set(re.findall(r"`trainer\.(\w+)[`:]", PAGE))
    assert trainer
    assert trainer <= set(inspect.signature(pl.Trainer).parameters)
    plugins = set(re.findall(r"`(?:lightning_memkit\.)?([A-Z]\w+)\(", PAGE))
    assert plugins <= set(lightning_memkit.__all__) | {"SFTConfig"}
    wrong = [
        f"{name}({option})"
        for name, options in re.findall(r"`([A-Z]\w+)\(([^`]*)\)`", PAGE)
        for option in re.findall(r"(\w+)=", options)
        if option not in inspect.signature(getattr(lightning_memkit, name)).parameters
    ]
    assert not wrong
    batches = {
        name for text in re.findall(r"`batches: \{([^}]*)\}`", PAGE) for name in re.findall(r"(\w+):", text)
    }
    assert batches
    assert batches <= {field.name for field in fields(BatchOptions)}
    assert "mask_prompt" in {field.name for field in fields(DocumentOptions)}
