"""The image example trains a network with batch normalization and a vision transformer, on digits and own arrays."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.examples import losses_in, train

pytestmark = pytest.mark.usefixtures("at_root")

NAME = "image_classification"
SMALL_NET = ["--model.net.width=8", "--model.net.blocks=2"]
SMALL_VIT: dict[str, Any] = {
    "image_size": 8, "patch_size": 4, "num_channels": 1, "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_labels": 10,
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*normalize with statistics of the batch:UserWarning")
def test_a_network_with_batch_normalization_learns_in_parts(tmp_path: Path, capsys) -> None:
    tight = "--trainer.callbacks.budget=2MiB"
    train(
        NAME,
        ["convnet.yaml"],
        tmp_path,
        *SMALL_NET,
        "--trainer.max_steps=6",
        "--model.learning_rate=1e-2",
        tight,
    )
    printed = capsys.readouterr().out
    losses = losses_in(printed)
    assert losses[-1] < losses[0] - 0.2, printed
    assert int(re.search(r"micro-batch (\d+)", printed)[1]) < 256  # pyright: ignore[reportOptionalSubscript]
    assert "val_accuracy" in printed


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*normalize with statistics of the batch:UserWarning")
def test_the_configs_as_they_are_learn_the_digits(tmp_path: Path, capsys) -> None:
    for config, expected in (("convnet.yaml", 0.9), ("vit.yaml", 0.8)):
        train(NAME, [config], tmp_path)
        found = re.findall(r"val_accuracy ([\d.]+)", capsys.readouterr().out)
        assert float(found[-1]) > expected, (config, found)


@pytest.mark.slow
def test_a_saved_vision_transformer_starts_on_own_arrays_of_other_classes(tmp_path: Path, capsys) -> None:
    from transformers import ViTConfig, ViTForImageClassification

    ViTForImageClassification(ViTConfig(**SMALL_VIT)).save_pretrained(tmp_path / "vit")
    generator = np.random.default_rng(0)
    labels = generator.integers(0, 3, 96)
    images = (generator.random((96, 8, 8, 1)) * 20 + 90 * labels[:, None, None, None]).astype(np.uint8)
    np.savez(tmp_path / "own.npz", images=images, labels=labels)
    own = [
        f"--data.path={tmp_path / 'own.npz'}", "--data.batch_size=32", "--model.classes=3",
        f"--model.net.weights={tmp_path / 'vit'}", f"--model.net.config={json.dumps({'num_labels': 3})}",
    ]  # fmt: skip
    train(NAME, ["vit.yaml"], tmp_path, *own, "--trainer.max_epochs=12")
    losses = losses_in(capsys.readouterr().out)
    assert losses[-1] < losses[0] / 2, losses
