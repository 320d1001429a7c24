"""The demo's budget on a GPU: what cuBLAS and a step take on a Hopper is within it, and the whole batch is not."""

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from examples.pretrain_causal_lm.model import CausalLM
from lightning_memkit import ActivationCheckpointing, PureBF16Precision, packed_attention, predict_memory
from lightning_memkit.memory.cublas import cublas_bytes
from lightning_memkit.memory.units import parse_bytes
from lightning_memkit.prediction.result import Prediction
from tests.examples import EXAMPLES, ROOT

ON_GPU = EXAMPLES / "pretrain_causal_lm" / "demo_on_gpu.yaml"
HEADROOM = 0.05  # MemoryBudget's
DOCUMENT = 64  # tokens


def config(name: str) -> dict[str, Any]:
    return yaml.safe_load((ON_GPU.parent / name).read_text(encoding="utf-8"))


def options(*sections: str) -> dict[str, Any]:
    """The last config that names an option decides, as in the command."""
    merged: dict[str, Any] = {}
    for name in ("budget.yaml", "demo.yaml", ON_GPU.name):
        content: Any = config(name)
        for section in sections:
            content = content.get(section, {})
        merged |= content
    return merged


def callback(name: str) -> dict[str, Any]:
    """A callback's options; the last list of callbacks replaces the others."""
    (found,) = (
        one["init_args"]
        for one in options("trainer")["callbacks"]
        if one["class_path"] == f"lightning_memkit.{name}"
    )
    return found


def predicted(rows: int, device: str) -> Prediction:
    """A step of so many rows of the demo's."""
    length = options("data", "init_args")["context"]
    given: Any = {**options("model", "init_args"), "attention": packed_attention}
    ids = torch.randint(given["vocabulary_size"], (rows, length))
    batch = {
        "input_ids": ids,
        "labels": ids.clone(),
        "position_ids": torch.arange(length).expand(rows, -1) % DOCUMENT,
        "cu_seqlens": torch.arange(0, rows * length + 1, DOCUMENT, dtype=torch.int32),
    }
    (precision,) = options("trainer")["plugins"]
    trainer = {
        "plugins": PureBF16Precision(**precision["init_args"]),
        "callbacks": [ActivationCheckpointing(**callback("ActivationCheckpointing"))],
        "gradient_clip_val": options("trainer")["gradient_clip_val"],
        "accumulate_grad_batches": 2,  # gradients are there in the forward of all parts but the first
    }
    return predict_memory(CausalLM(**given), batch, trainer=trainer, device=device)


@pytest.mark.parametrize("device", ["h100-80gb", "h200"])
def test_the_demo_fits_its_budget_on_a_hopper(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda *_: (9, 0))
    cublas = cublas_bytes(torch.device("cuda"))
    budget = parse_bytes(callback("MemoryBudget")["budget"])
    one = predicted(1, device)
    assert one.library_bytes == cublas == 64 << 20
    assert one.allocated_bytes == pytest.approx(cublas + one.peak_bytes, rel=0.01)
    assert cublas + one.peak_bytes < one.reserved_bytes <= (1 - HEADROOM) * budget
    rows = options("data", "init_args")["batch_size"]
    assert predicted(rows, device).reserved_bytes > budget  # else nothing would be split


def test_the_demo_on_a_cpu_has_another_budget() -> None:
    """In which cuBLAS alone would not fit: what is given in addition only raises it."""
    (alone,) = (
        one["init_args"]["budget"]
        for one in config("demo.yaml")["trainer"]["callbacks"]
        if one["class_path"].endswith("MemoryBudget")
    )
    assert parse_bytes(alone) < 64 << 20 < parse_bytes(callback("MemoryBudget")["budget"])


@pytest.mark.parametrize("has_card", [False, True])
def test_make_demo_adds_the_config_where_cuda_is_available(
    has_card: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = (ROOT / "Makefile").read_text(encoding="utf-8").partition("\ndemo:")[2].partition("\n\n")[0]
    assert re.findall(r"--config (\S+)", recipe)[:2] == [
        "examples/pretrain_causal_lm/budget.yaml",
        "examples/pretrain_causal_lm/demo.yaml",
    ]
    (code,) = re.findall(r"\$\$\(\$\(BIN\)/python -c '(.+?)'\)", recipe)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_card)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(code, {})
    words = printed.getvalue().split()
    assert words == (["--config", str(ON_GPU.relative_to(ROOT))] if has_card else [])
    assert not words or (ROOT / Path(words[1])).is_file()
