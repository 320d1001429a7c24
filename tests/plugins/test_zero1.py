"""ZeRO-1: 8-bit states, shares of the bytes, float32 checkpoints and averages, on two gloo ranks and on four."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer

from lightning_memkit.optim.consolidated_files import consolidate_file
from tests.plugins import several_ranks
from tests.plugins.ranks_zero1 import EightBit, Equal
from tests.processes import run_on_ranks

EIGHT_BIT = (
    1e-3  # gradients that differ by rounding fall on the other side of a step of the 8-bit scale now and then
)


def launch(folder: Path, ranks: int, *words: str) -> list[dict[str, Any]]:
    path = folder / "found.pt"
    done = run_on_ranks("tests.plugins.ranks_zero1", str(path), *words, ranks=ranks)
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(path)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """All of it comes from one launch, which takes longer than the runs do."""
    folder = tmp_path_factory.mktemp("zero1")
    return folder, launch(folder, 2, "all")


def test_states_are_in_eight_bits_and_train_as_one_process_does(two: Any) -> None:
    zero, one = (found["eight bits"] for found in two[1])
    alone = several_ranks.trained("auto", "32-true", 1, 0, kind=EightBit)
    dtypes = {**zero["dtypes"], **one["dtypes"]}
    assert not zero["dtypes"].keys() & one["dtypes"].keys()
    large = [name for name, value in alone["weights"].items() if value.numel() >= 256 and "layers" in name]
    assert {dtypes[name] for name in large} == {"torch.uint8"}
    assert dtypes["embedding.weight"] == "torch.float32"  # 8 bits are too few for embeddings
    assert zero["losses"] == pytest.approx(alone["losses"], abs=EIGHT_BIT)
    for name, weight in alone["weights"].items():
        assert torch.equal(zero["weights"][name], one["weights"][name]), name
        assert float((zero["weights"][name] - weight).abs().max()) <= EIGHT_BIT, name
    tables = 2 * 256 * 4  # the scales of both moments, which each rank has
    assert zero["kept"]["states"] + one["kept"]["states"] == alone["kept"]["states"] + tables


EIGHT_BIT = (
    1e-3  # gradients that differ by rounding fall on the other side of a step of the 8-bit scale now and then
)


def test_sharded_parameters_are_refused_by_eight_bits(two: Any) -> None:
    for found in two[1]:
        refusal = found["eight bits"]["refusal"]
        assert "AdamW8bit steps whole tensors, and these parameters are sharded" in refusal
        assert "ZeRO1Strategy" in refusal


def check_shares(found: list[dict[str, Any]], ranks: int) -> None:
    """Weights and gradients are whole, and no rank has more than its share of the states and 5 %."""
    alone = several_ranks.trained("auto", "32-true", 1, 0, kind=Equal)["kept"]
    total = alone["weights"] + alone["gradients"] + alone["states"] / ranks
    for one in found:
        kept = one["equal"]
        assert kept["weights"] == alone["weights"]
        assert kept["gradients"] == alone["gradients"]
        assert kept["states"] == pytest.approx(alone["states"] / ranks, rel=0.05)
        assert sum(kept.values()) == pytest.approx(total, rel=0.05)
    assert sum(one["equal"]["states"] for one in found) == alone["states"]


def test_two_ranks_keep_half_of_the_states_each(two: Any) -> None:
    check_shares(two[1], 2)


@pytest.mark.slow
def test_four_ranks_keep_a_quarter_of_the_states_each(tmp_path: Path) -> None:
    check_shares(launch(tmp_path, 4), 4)


@pytest.mark.parametrize(("mode", "bits"), [("split", 0.0), ("kahan", 2.0**-15)])
def test_no_bit_of_a_float32_checkpoint_is_lost(two: Any, mode: str, bits: float, tmp_path: Path) -> None:
    wide = torch.load(two[0] / "float32.ckpt", weights_only=True)["state_dict"]
    consolidate_file(two[0] / f"{mode}.ckpt", tmp_path / "again.ckpt")
    again = torch.load(tmp_path / "again.ckpt", weights_only=True)["state_dict"]
    for name, value in wide.items():
        assert again[name].dtype == torch.float32
        error = (again[name] - value).abs() / value.abs().clamp(min=1e-30)
        assert float(error.max()) <= bits, name
    assert any(not torch.equal(value, value.bfloat16().float()) for value in wide.values())


def test_averages_are_those_of_ranks_that_keep_all_states(two: Any, tmp_path: Path) -> None:
    """DDP has every low half everywhere; of ZeRO-1's ranks each has its share."""
    wide = {}
    for name in ("ddp", "zero1"):
        consolidate_file(two[0] / f"averaged {name}.ckpt", tmp_path / f"{name}.ckpt")
        wide[name] = torch.load(tmp_path / f"{name}.ckpt", weights_only=True)["state_dict"]
    zero, one = (found["averaged"] for found in two[1])
    for name, value in wide["ddp"].items():
        assert torch.equal(wide["zero1"][name], value), name
        assert torch.equal(zero["zero1"][name], zero["ddp"][name]), name
        assert torch.equal(zero["zero1"][name], one["zero1"][name]), name
    assert any(not torch.equal(value, value.bfloat16().float()) for value in wide["zero1"].values())


def test_a_checkpoint_of_ranks_resumes_without_them(two: Any) -> None:
    trainer = Trainer(
        max_steps=several_ranks.STEPS + 1, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(several_ranks.Language(), several_ranks.Loader(0, 1), ckpt_path=two[0] / "float32.ckpt")
    assert trainer.global_step == several_ranks.STEPS + 1
