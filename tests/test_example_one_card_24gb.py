"""The committed plan for 8 billion parameters is what the planner writes, and its configuration trains."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_memkit.cli import main
from tests.examples import EXAMPLES, losses_in, train

pytestmark = pytest.mark.usefixtures("at_root")

NAME = "one_card_24gb"
TINY = {
    "model_type": "llama", "vocab_size": 259, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip


def planned(path: Path) -> dict[str, Any]:
    """What a planned config decides; the options of the report, which the planner passes on, apart."""
    config = yaml.safe_load(path.read_text(encoding="utf-8"))
    callbacks = config["trainer"]["callbacks"]
    for callback in callbacks:
        if callback["class_path"].endswith("MemoryReport"):
            callback.pop("init_args", None)
    chosen = {name: config["trainer"][name] for name in ("max_steps", "plugins", "accumulate_grad_batches")}
    return {"callbacks": callbacks, **chosen, "model": config["model"], "data": config["data"]}


@pytest.mark.slow
def test_the_committed_plan_is_what_the_planner_writes(tmp_path: Path) -> None:
    written = tmp_path / "planned.yaml"
    words = ["--config", str(EXAMPLES / NAME / "model.yaml"), "--budget", "24GiB", "--device", "rtx4090"]
    assert main(["plan", *words, "--output", str(written)]) == 0
    assert planned(written) == planned(EXAMPLES / NAME / "planned.yaml")


@pytest.mark.slow  # that it parses is tested with all examples' configs
@pytest.mark.filterwarnings("ignore:.*:UserWarning")  # nothing is offloaded from a CPU
def test_the_planned_configuration_trains_a_small_model(tmp_path: Path, capsys) -> None:
    options = [
        f"--model.config={json.dumps(TINY)}", "--model.warmup_steps=1", "--model.optimizer.lr=3e-3",
        "--data.context=256", "--data.batch_size=4", "--data.documents.limit=16", "--data.documents.validation=0",
        "--trainer.limit_val_batches=0", "--trainer.max_steps=6",
    ]  # fmt: skip
    train(NAME, ["planned.yaml"], tmp_path, *options)
    losses = losses_in(capsys.readouterr().out)
    assert losses[-1] < losses[0] - 0.2, losses
