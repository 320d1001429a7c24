"""The example for several GPUs: every file is parsed, and those for one and two devices train at a tiny size."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_memkit.cli import main
from tests.processes import run_on_ranks
from tests.ranks_all_offloaded import BETWEEN, STEP
from tests.testing.needs import NEEDS_COMPILER

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "examples" / "multi_gpu"
PLACES = sorted(path.stem for path in FOLDER.glob("*.yaml") if path.stem != "fsdp2")
TINY = [
    "--model.width=64", "--model.layers=3", "--model.heads=2", "--model.warmup_steps=2", "--data.context=64",
    "--data.batch_size=8", "--trainer.max_steps=6", "--trainer.log_every_n_steps=1", "--trainer.logger=false",
    "--trainer.gradient_clip_val=null",
]  # fmt: skip
LAUNCH = "import sys; from lightning_memkit.cli import main; sys.exit(main(sys.argv[1:]))"


def configs(place: str) -> list[str]:
    return [f"--config={FOLDER / name}.yaml" for name in ("fsdp2", place)]


@pytest.mark.parametrize("place", PLACES)
def test_every_file_is_parsed_after_the_job(
    place: str, capsys: pytest.CaptureFixture[str], monkeypatch
) -> None:
    monkeypatch.chdir(ROOT)
    assert main(["fit", *configs(place), "--print_config"]) == 0
    config = yaml.safe_load(capsys.readouterr().out)["trainer"]
    given = yaml.safe_load((FOLDER / f"{place}.yaml").read_text())["trainer"]
    assert {name: config[name] for name in ("devices", "num_nodes") if name in given} == {
        name: given[name] for name in ("devices", "num_nodes") if name in given
    }
    options = given.get("strategy", {}).get("init_args", {"stage": 3})
    assert config["strategy"]["class_path"] == "lightning_memkit.FSDP2Strategy"
    assert options.items() <= config["strategy"]["init_args"].items()


def test_the_readme_names_every_file() -> None:
    text = (FOLDER / "README.md").read_text()
    assert set(re.findall(r"(\w+)\.yaml", text)) == {*PLACES, "fsdp2"}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    body = "    return sorted(value for value in values if value != {})\n"
    texts = [f"def pick_{i}(values):\n" + body.format(i) * (1 + i % 4) for i in range(100)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def run(words: list[str]) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", *words]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def trained(place: str, corpus: Path, folder: Path) -> list[float]:
    """The losses of the first rank."""
    script = folder / "run.py"  # started again for the second rank
    script.write_text(LAUNCH)
    options = [f"--data.source={corpus}", f"--trainer.default_root_dir={folder}", "--trainer.accelerator=cpu"]
    printed = run([str(script), "fit", *configs(place), *TINY, *options])
    assert (folder / "checkpoints" / "last.ckpt" / ".metadata").is_file()
    assert "memory report" in printed
    return [float(found) for found in re.findall(r"loss ([\d.]+)", printed)]


@pytest.fixture(scope="module")
def losses_of_two(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return trained("two_devices", corpus, tmp_path_factory.mktemp("two"))


def test_two_devices_train_and_save(losses_of_two: list[float]) -> None:
    assert len(losses_of_two) == 6
    assert losses_of_two[-1] < losses_of_two[0] - 0.3


@pytest.mark.slow
def test_one_device_trains_and_saves(corpus: Path, tmp_path: Path) -> None:
    losses = trained("one_device", corpus, tmp_path)
    assert losses[-1] < losses[0] - 0.3


@pytest.mark.slow
@NEEDS_COMPILER
def test_all_is_offloaded_at_once(corpus: Path, losses_of_two: list[float], tmp_path: Path) -> None:
    """On ranks with an accelerator without hardware: the losses are those without any offload."""
    options = [
        f"--data.source={corpus}", f"--trainer.default_root_dir={tmp_path}", "--trainer.devices=2",
        "--trainer.enable_checkpointing=false",
    ]  # fmt: skip
    done = run_on_ranks(
        "tests.ranks_all_offloaded", str(tmp_path / "found.json"), *configs("all_offloaded"), *TINY, *options
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads((tmp_path / "found.json").read_text())
    assert found["losses"] == pytest.approx(losses_of_two, rel=5e-3)
    assert found["devices"] == found["states"] == ["cpu"]
    shard = found["weights"][0] / 2
    assert max(found[BETWEEN]) < 0.1 * shard  # buffers and a batch
    inputs_of_blocks = 3 * 8 * 64 * 64 * 2
    assert min(found[STEP]) > shard + 0.9 * inputs_of_blocks  # gradients and activations
