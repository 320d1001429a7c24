"""LightningModules that configs of the CLI tests name; each notes what its build staged."""

import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader

from tests.initialization.test_building import Float32Bytes

BUILT: list[LightningModule] = []


class Early(LightningModule):
    """Built in `__init__`."""

    def __init__(self, width: int = 64, network: nn.Module | None = None):
        super().__init__()
        self.counter = Float32Bytes()
        with self.counter:
            self.network: nn.Module | None = self.build(width) if network is None else network
        BUILT.append(self)

    def build(self, width: int) -> nn.Module | None:
        return nn.Sequential(
            nn.Linear(4, width), nn.Dropout(0.2), nn.Linear(width, width), nn.Linear(width, 1)
        )

    def on_fit_start(self):
        self.before = [p.detach().float().clone() for p in self.parameters()]

    def training_step(self, batch, batch_idx):
        assert self.network is not None
        return self.network(batch).float().square().mean()

    def train_dataloader(self):
        return DataLoader(torch.ones(8, 4), batch_size=2)  # pyright: ignore[reportArgumentType]

    def predict_dataloader(self):
        return self.train_dataloader()

    def predict_step(self, batch, batch_idx):
        return batch

    def change(self) -> float:
        return max(
            (p - old).abs().max().item() for p, old in zip(self.parameters(), self.before, strict=True)
        )


class Late(Early):
    """Built in `configure_model`."""

    def build(self, width: int) -> None:
        return None

    def configure_model(self):
        if self.network is None:
            with self.counter:
                self.network = Early.build(self, 64)


class WithOptimizer(Early):
    """Has an optimizer of its own."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Failing(Early):
    """Fails in its first step."""

    def training_step(self, batch, batch_idx):
        raise ValueError("the third document is empty")


class Interrupted(Early):
    """Is interrupted in its first step."""

    def training_step(self, batch, batch_idx):
        raise KeyboardInterrupt


class Talkative(Early):
    """Refuses itself at length."""

    def __init__(self) -> None:
        super().__init__()
        raise ValueError("no, " * 1_000 + "never")


class Network(nn.Module):
    """A module that a config passes to `Early`."""

    def __init__(self, width: int = 32):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, width), nn.Linear(width, 1))

    def forward(self, x):
        return self.layers(x)
