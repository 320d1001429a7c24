"""The main job as a whole: documents stay apart, every budget is kept, and the result does not change with it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from examples.pretrain_causal_lm.model import CausalLM
from lightning_memkit import (
    ActivationCheckpointing,
    MemoryBudget,
    MemoryReport,
    PackedDataModule,
    PureBF16Precision,
    packed_attention,
)
from tests.plugins.noise import NOISE
from tests.plugins.toys import trainer

pytestmark = NOISE
CONTEXT, ROWS = 128, 16


def documents() -> list[list[int]]:
    """Documents of 5 to 60 tokens in which every token follows from the one before."""
    generator = np.random.default_rng(0)
    lengths = generator.integers(5, 60, 1200)
    return [list((int(generator.integers(50)) + 7 * np.arange(length)) % 61) for length in lengths]


def model() -> CausalLM:
    torch.manual_seed(1)
    return CausalLM(64, width=64, layers=3, heads=4, attention=packed_attention, warmup_steps=2)


def test_no_logit_hears_of_another_document() -> None:
    """The oracle is each document alone; then one document is perturbed and no other logit moves."""
    module = model().eval()
    data = PackedDataModule(documents(), context=CONTEXT, batch_size=4)
    data.setup("fit")
    batch = next(iter(data.train_dataloader()))
    with torch.no_grad():
        packed = module(batch["input_ids"], batch["position_ids"], batch["cu_seqlens"]).flatten(0, 1)
        ends = batch["cu_seqlens"].tolist()
        tokens = batch["input_ids"].flatten()
        assert len(ends) > 12
        for start, end in zip(ends, ends[1:], strict=False):
            alone = module(tokens[None, start:end], batch["position_ids"].flatten()[None, start:end],
                           torch.tensor([0, end - start], dtype=torch.int32))  # fmt: skip
            assert (alone[0] - packed[start:end]).abs().max() <= 1e-5
        changed = tokens.clone()
        changed[ends[2] : ends[3]] = (changed[ends[2] : ends[3]] + 13) % 61
        moved = module(changed.view_as(batch["input_ids"]), batch["position_ids"], batch["cu_seqlens"])
    differs = (moved.flatten(0, 1) - packed).abs().amax(-1)
    assert differs[ends[2] : ends[3]].max() > 1e-3
    assert max(differs[: ends[2]].max(), differs[ends[3] :].max()) <= 1e-5


def run(folder: Path, budget: str, bf16: bool) -> tuple[int, float, MemoryBudget, MemoryReport]:
    callback, report = MemoryBudget(budget, enforce="always"), MemoryReport(live=False)
    plugins: dict[str, Any] = {"plugins": [PureBF16Precision()]} if bf16 else {}
    module = model()
    fitted = trainer(ActivationCheckpointing(), callback, report, max_steps=6, gradient_clip_val=1.0,
                     limit_val_batches=0, default_root_dir=folder, **plugins)  # fmt: skip
    fitted.fit(module, datamodule=PackedDataModule(documents(), context=CONTEXT, batch_size=ROWS))
    assert callback.sizing is not None
    return callback.sizing.micro_batch_size, float(fitted.callback_metrics["train_loss"]), callback, report


@pytest.mark.parametrize(
    ("bf16", "budgets", "allowed"),
    [
        (False, ("6MiB", "24MiB"), 1e-5),
        (True, ("6MiB", "24MiB"), 0.01),
        pytest.param(False, ("4MiB", "6MiB", "24MiB"), 1e-5, marks=pytest.mark.slow),
        pytest.param(True, ("6MiB", "8MiB", "24MiB"), 0.01, marks=pytest.mark.slow),
    ],
)
def test_every_budget_is_kept_with_one_result(
    tmp_path: Path, bf16: bool, budgets: tuple[str, ...], allowed: float
) -> None:
    """Every byte of every step is counted; each budget gives another micro-batch and the same loss."""
    sizes, losses = [], []
    for budget in budgets:
        size, loss, callback, report = run(tmp_path, budget, bf16)
        assert callback.peak_bytes <= callback.budget_bytes
        assert report.anatomy is not None
        assert report.anatomy.peak_bytes <= callback.budget_bytes
        assert callback.retries == 0
        sizes.append(size)
        losses.append(loss)
    assert len(set(sizes)) == len(budgets), sizes
    assert max(losses) - min(losses) <= allowed, losses
    assert losses[0] < 4.0  # 61 tokens: it learns
