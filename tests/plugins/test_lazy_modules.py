"""Modules whose weights get their shapes by the first forward, under MemoryBudget, against plain Lightning."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.utils.data import DataLoader, TensorDataset

from lightning_memkit import MemoryBudget
from tests.plugins.toys import trained, weights

NETS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.LazyLinear(1)),
    "convolution": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 6)), nn.LazyConv1d(4, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(1)
    ),
    "beside ordinary ones": lambda: nn.Sequential(nn.Linear(12, 8), nn.Dropout(0.0), nn.LazyLinear(1)),
}
NORM = lambda: nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.LazyLinear(1))  # noqa: E731


class Lazy(LightningModule):
    def __init__(self, net: Callable[[], nn.Module], optimizer: Callable[[Any], Any]) -> None:
        super().__init__()
        self.net, self.optimizer = net(), optimizer

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return (self.net(x) - y).square().mean()

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters())


def groups(params: Any) -> torch.optim.Optimizer:
    first, *others = params
    return torch.optim.SGD([{"params": [first], "lr": 0.05}, {"params": others}], lr=0.01, momentum=0.9)


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "SGD in groups": groups,
}


def fit(net: Callable[[], nn.Module], optimizer: str, *callbacks: Any, **options: Any) -> LightningModule:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(36, 12, generator=generator).to(options.get("dtype", torch.float32))
    data = DataLoader(TensorDataset(x, x.sum(1, keepdim=True).sin()), batch_size=12)
    module, _ = trained(
        *callbacks, module=lambda: Lazy(net, OPTIMIZERS[optimizer]), data=data, max_steps=6, **options
    )
    assert not any(isinstance(p, UninitializedParameter) for p in module.parameters())
    return module


pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:Lazy modules are a new feature"),
    pytest.mark.filterwarnings("ignore:The total number of parameters detected may be inaccurate"),
]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("net", NETS)
def test_lazy_modules_that_run_whole_train_bitwise_as_without(net: str, optimizer: str) -> None:
    plain = fit(NETS[net], optimizer)
    whole = fit(NETS[net], optimizer, MemoryBudget(micro_batch_size=12))
    assert torch.equal(weights(whole), weights(plain))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("size", [5, 1])
def test_lazy_modules_in_parts_train_as_the_whole_batch(net: str, size: int) -> None:
    # In float32: a lazy module's weights are made in the dtype of its construction, whatever it is cast to later.
    plain, split = (
        fit(NETS[net], "AdamW", *callbacks) for callbacks in ([], [MemoryBudget(micro_batch_size=size)])
    )
    torch.testing.assert_close(weights(split), weights(plain), rtol=2e-4, atol=2e-5)


def test_lazy_batch_normalization_runs_whole_as_without() -> None:
    with pytest.warns(UserWarning, match="normalize with statistics"):
        whole = fit(NORM, "AdamW", MemoryBudget(micro_batch_size=12))
    plain = fit(NORM, "AdamW")
    for name, value in plain.state_dict().items():
        assert torch.equal(whole.state_dict()[name], value), name


@pytest.mark.sampled(2)
@pytest.mark.parametrize("net", NETS)
def test_an_open_size_leaves_lazy_modules_as_without(net: str) -> None:
    plain = fit(NETS[net], "AdamW")
    budgeted = fit(NETS[net], "AdamW", MemoryBudget("1GiB"))
    torch.testing.assert_close(weights(budgeted), weights(plain), rtol=2e-4, atol=2e-5)
