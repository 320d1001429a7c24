"""`memkit fit` of the demo, and plans for the card that is here: what is planned trains within the budget."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_memkit import ActivationCheckpointing, Budget, plan
from tests.gpu.card import ROOT, accelerator, needs_cuda, needs_package, on_cpu, sized
from tests.gpu.models import Language, batches, small, tokens
from tests.plugins.noise import NOISE
from tests.plugins.toys import trainer

pytestmark = [pytest.mark.gpu, *NOISE, pytest.mark.filterwarnings("ignore:.*jsonargparse")]
FOLDER = ROOT / "examples" / "pretrain_causal_lm"
TINY = ["--model.width=32", "--model.layers=2", "--model.heads=2", "--data.context=64", "--data.batch_size=8"]
QUICK = ["--trainer.limit_val_batches=1", "--trainer.num_sanity_val_steps=0", "--trainer.log_every_n_steps=1"]


@pytest.fixture
def main(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    needs_package("jsonargparse", "docstring_parser", "typeshed_client")  # of jsonargparse[signatures]
    from lightning_memkit.cli import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return main


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Short functions: the demo's own corpus takes seconds to read."""
    path = tmp_path / "corpus.jsonl"
    body = "    return sorted(value for value in values if value != {})\n"
    texts = [f"def pick_{i}(values):\n" + body.format(i) * (1 + i % 4) for i in range(sized(1000, 100))]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def configs() -> list[str]:
    """As the Makefile gives them."""
    names = ("budget.yaml", "demo.yaml", *sized(("demo_on_gpu.yaml",), ()))
    return [f"--config={FOLDER / name}" for name in names]


@pytest.mark.usefixtures("device")
def test_the_demo_trains_within_its_budget(main: Any, corpus: Path, tmp_path: Path, capsys: Any) -> None:
    words = [
        *configs(),
        *sized([], TINY),
        *QUICK,
        f"--data.source={corpus}",
        f"--trainer.default_root_dir={tmp_path}",
        f"--trainer.accelerator={accelerator()}",
        "--trainer.logger=lightning.pytorch.loggers.CSVLogger",
        f"--trainer.logger.save_dir={tmp_path}",
        "--trainer.max_steps=12",
        "--trainer.val_check_interval=1.0",
        "--model.warmup_steps=2",
    ]
    assert main(["fit", *words]) == 0, capsys.readouterr().err
    printed = capsys.readouterr().out
    for category in ("weights", "optimizer states", "predicted"):
        assert category in printed
    needs_cuda("the allocator's own peak")
    assert torch.cuda.max_memory_reserved() <= 144 << 20


@pytest.mark.usefixtures("device")
def test_the_command_plans_for_the_device_that_is_here(main: Any, corpus: Path, capsys: Any) -> None:
    given = [
        *configs(),
        *sized([], TINY),
        f"--data.source={corpus}",
        f"--trainer.accelerator={accelerator()}",
    ]
    budget = sized("1GiB", "8MiB")
    assert main(["plan", *given, "--budget", budget, "--device", "auto"]) == 0, capsys.readouterr().err
    printed = capsys.readouterr().out
    assert re.search(r"^1  .*[KMG]iB", printed, re.MULTILINE)  # what is the fastest that fits
    assert ("on the CPU" in printed) is on_cpu()


@pytest.mark.filterwarnings("ignore:MemoryBudget")
def test_what_is_planned_trains_within_the_budget(device: torch.device) -> None:
    batch = {"ids": tokens(16, sized(512, 32))}
    budget = Budget(sized("1GiB", "8MiB"), "auto")
    given = {"precision": "bf16-mixed", "callbacks": [ActivationCheckpointing("full")]}
    found = plan(Language(small), batch, budget, trainer=given)
    assert found.fitting
    kwargs = {"accelerator": accelerator(), **found.trainer_kwargs()}
    callbacks = kwargs.pop("callbacks", [])
    fitted = trainer(*callbacks, max_steps=3, **kwargs)
    if not on_cpu():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)  # a plan times operators here
    fitted.fit(Language(small), batches(3, 16, sized(512, 32)))
    assert fitted.global_step == 3
    needs_cuda("the allocator's own peak")
    # Its peak is predicted; the allocator rounds by segments. If it misses: is it tensors, or segments left by trials?
    reserved, stats = torch.cuda.max_memory_reserved(device), torch.cuda.memory_stats(device)
    asked = ("allocated_bytes.all.peak", "requested_bytes.all.peak", "inactive_split_bytes.all.peak")
    beside = {name: stats[name] >> 20 for name in asked}
    assert reserved == pytest.approx(found.best.taken_bytes, rel=0.15), beside
    assert reserved <= budget.bytes()
