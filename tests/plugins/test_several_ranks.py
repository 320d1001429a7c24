"""FSDP2, ZeRO-1 and DDP over a module that knows nothing of them, against one process with the whole batch."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_memkit import FSDP2Strategy
from tests.plugins import several_ranks
from tests.processes import run_on_ranks

FLOAT32, BFLOAT16 = 2e-5, 5e-3  # of losses and weights; of the weights' norm


@cache
def alone(precision: str) -> dict[str, Any]:
    return several_ranks.trained("auto", precision, 1, 0)


def together(path: Path, ranks: int, *words: str) -> dict[str, Any]:
    done = run_on_ranks("tests.plugins.several_ranks", str(path), *words, ranks=ranks)
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(path)


def check(found: dict[str, Any], precision: str) -> None:
    one = alone(precision)
    if precision == "32-true":
        assert found["losses"] == pytest.approx(one["losses"], abs=FLOAT32)
        for name, weight in one["weights"].items():
            assert float((found["weights"][name] - weight).abs().max()) <= FLOAT32, name
    else:
        assert found["losses"] == pytest.approx(one["losses"], rel=BFLOAT16)
        for name, weight in one["weights"].items():
            assert float(found["weights"][name].norm() / weight.norm() - 1) == pytest.approx(
                0, abs=BFLOAT16
            ), name
    assert len(found["losses"]) == several_ranks.STEPS


CASES = [
    (2, "FSDP2Strategy", {"stage": 3}, "32-true"),
    (2, "FSDP2Strategy", {"stage": 2}, "kahan"),
    (2, "ZeRO1Strategy", {}, "32-true"),
    *[
        pytest.param(ranks, name, options, precision, marks=pytest.mark.slow)
        for ranks, name, options, precision in [
            (4, "FSDP2Strategy", {"stage": 3}, "32-true"),
            (4, "FSDP2Strategy", {"stage": 3}, "kahan"),
            (4, "FSDP2Strategy", {"stage": 2}, "32-true"),
            (4, "FSDP2Strategy", {"stage": 3, "replicas": 2}, "32-true"),
            (2, "FSDP2Strategy", {"stage": 3, "cpu_offload": True}, "32-true"),
            (2, "ZeRO1Strategy", {}, "kahan"),
            (4, "ZeRO1Strategy", {}, "32-true"),
            (4, "ZeRO1Strategy", {}, "kahan"),
            (2, "ddp", {}, "32-true"),
            (4, "ddp", {}, "32-true"),
        ]
    ],
]


@pytest.mark.parametrize(("ranks", "name", "options", "precision"), CASES)
def test_ranks_train_as_one_process_does(tmp_path, ranks, name, options, precision):
    found = together(tmp_path / "found.pt", ranks, name, json.dumps(options), precision)
    check(found, precision)
    if name == "FSDP2Strategy":
        shared = ranks // options.get("replicas", 1)
        kept, one = sum(found["kept"].values()), sum(alone(precision)["kept"].values())
        assert kept == pytest.approx(one / shared, rel=0.05)
    if name == "ZeRO1Strategy":  # whole parameters are shared out: not all shares are alike
        one = alone(precision)["kept"]
        assert found["kept"]["weights"] == one["weights"]
        assert found["kept"]["states"] == pytest.approx(one["states"] / ranks, rel=0.5)


def test_the_optimizer_of_a_config_trains_what_is_sharded(tmp_path):
    """memkit makes it after sharding; LightningCLI before: then nothing would be trained, which is refused."""
    found = together(tmp_path / "found.pt", 2)
    assert min(found["moved"].values()) > 0
    assert "nothing would be trained" in found["refused"]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"stage": 1}, "stage=1"),
        ({"blocks": "layers.*"}, "layers"),
        ({"replicas": 0}, "replicas=0 is no number of copies"),
    ],
)
def test_what_is_outside_its_range_is_refused(options, match):
    with pytest.raises(ValueError, match=match):
        FSDP2Strategy(**options)
