"""What is no callback and stands among the callbacks: the error says where it belongs."""

from typing import Any

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

import lightning_memkit


def fit(*callbacks: Any) -> None:
    quiet: Any = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(callbacks=[*callbacks], accelerator="cpu", enable_checkpointing=False, **quiet)
    trainer.fit(BoringModel())


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("PureBF16Precision", "Trainer(plugins=PureBF16Precision(...))"),
        ("OnDeviceStrategy", "Trainer(strategy=OnDeviceStrategy(...))"),
        ("FSDP2Strategy", "Trainer(strategy=FSDP2Strategy(...))"),
        ("ZeRO1Strategy", "Trainer(strategy=ZeRO1Strategy(...))"),
    ],
)
def test_the_error_names_the_place(name: str, words: str) -> None:
    misplaced: Any = getattr(lightning_memkit, name)()
    with pytest.raises(AttributeError) as refused:
        fit(misplaced)
    assert str(refused.value) == f"{name} stands among the callbacks, and is none; write {words}."
