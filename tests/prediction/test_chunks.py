"""A module in chunks is predicted as it runs, within .01 %, without being asked about its rows again and again."""

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_memkit import checkpoint_chunks, checkpoint_modules, predict_memory
from lightning_memkit.memory.meter import ByteMeter

WIDTH = 32


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class _Module(L.LightningModule):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


class Contrastive(_Module):
    def __init__(self, rows: int) -> None:
        super().__init__()
        self.towers = nn.ModuleList(nn.Sequential(_Block(), _Block(), nn.Linear(WIDTH, 8)) for _ in range(2))
        for tower in self.towers:
            checkpoint_chunks(tower, rows=rows)

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        scores = self.towers[0](batch["x"]) @ self.towers[1](batch["y"]).T
        return F.cross_entropy(scores, torch.arange(len(scores), device=scores.device))


class LongRow(_Module):
    def __init__(self, tokens: int, policy: str | None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block() for _ in range(3))
        for name in [f"blocks.{number}.{part}" for number in range(3) for part in ("norm", "mlp")]:
            checkpoint_chunks(self.get_submodule(name), tokens=tokens)
        if policy is not None:
            checkpoint_modules(self, policy)

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        x = batch["x"]
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def measured(module: Any, batch: dict[str, Tensor]) -> int:
    """The peak of the second step."""
    optimizer, states = module.configure_optimizers(), []
    for _ in range(2):
        with ByteMeter() as meter:
            meter.track([*module.parameters(), *batch.values(), *states])
            meter.track(one.grad for one in module.parameters() if one.grad is not None)
            loss = module.training_step(batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        states = [one for state in optimizer.state.values() for one in state.values()]
    return meter.peak_bytes


@pytest.mark.parametrize("rows", [16, 100, 1000])
@pytest.mark.long
def test_contrastive(rows: int) -> None:
    batch = {"x": torch.randn(200, WIDTH), "y": torch.randn(200, WIDTH)}
    predicted = predict_memory(Contrastive(rows), batch).peak_bytes
    assert predicted == pytest.approx(measured(Contrastive(rows), batch), rel=1e-4)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("policy", [None, "full"])
@pytest.mark.parametrize("tokens", [90, 500])
@pytest.mark.long
def test_long_row(tokens: int, policy: str | None) -> None:
    batch = {"x": torch.randn(1, 1000, WIDTH)}
    predicted = predict_memory(LongRow(tokens, policy), batch).peak_bytes
    states = (
        0 if policy is None else 3 * torch.get_rng_state().nbytes
    )  # that checkpointing keeps, unseen by a meter
    assert predicted == pytest.approx(measured(LongRow(tokens, policy), batch) + states, rel=1e-4)
