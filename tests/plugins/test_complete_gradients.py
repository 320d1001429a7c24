"""Hooks on complete gradients, in batches that are split: each gradient comes once. The oracle is the plain run."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_memkit import MemoryBudget
from tests.plugins.toys import trainer, weights
from tests.processes import run_on_ranks

ROWS, CLASSES = 8, 4
Hook = Callable[["Net", nn.Parameter], object]


class Net(LightningModule):
    """Two experts, of which rows with a low first feature use the one and all others the other."""

    def __init__(self, hook: Hook | None = None, steps: bool = True) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(6, CLASSES, dtype=torch.float64) for _ in range(2)])
        self.steps, self.calls, self.sum = steps, 0, torch.zeros((), dtype=torch.float64)
        self.inner: dict[int, torch.optim.Optimizer] = {}
        if hook is not None:
            for parameter in self.parameters():

                def call(parameter: Any, hook: Hook = hook) -> None:
                    hook(self, parameter)

                parameter.register_post_accumulate_grad_hook(call)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        low = x[:, 0] < -0.8
        losses = torch.where(low, *(F.cross_entropy(one(x), y, reduction="none") for one in self.experts))
        return losses.mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.3 if self.steps else 0.0)


def halve(net: Net, parameter: Any) -> None:
    parameter.grad.mul_(0.5)


def clamp(net: Net, parameter: Any) -> None:
    parameter.grad.clamp_(-0.02, 0.02)


def exchange(net: Net, parameter: Any) -> None:
    parameter.grad = parameter.grad.sign()


def count(net: Net, parameter: Any) -> None:
    net.calls += 1
    net.sum += parameter.grad.abs().sum()


def step_now(net: Net, parameter: Any) -> None:
    """The optimizer in the backward of torch's tutorial, with momentum."""
    optimizer = net.inner.setdefault(id(parameter), torch.optim.SGD([parameter], 0.3, momentum=0.9))
    optimizer.step()
    optimizer.zero_grad()


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [
        (torch.randn(ROWS, 6, generator=generator, dtype=torch.float64), torch.arange(ROWS) % CLASSES)
        for _ in range(6)
    ]


def fit(size: Any, hook: Hook | None, *, steps: bool = True, **trainer_options: Any) -> Net:
    torch.manual_seed(0)
    net = Net(hook, steps)
    callbacks = [] if size is None else [MemoryBudget("1GiB", micro_batch_size=size, within="step")]
    data: Any = batches()
    trainer(*callbacks, max_epochs=1, max_steps=-1, **trainer_options).fit(
        net, DataLoader(data, batch_size=None)
    )
    return net


@pytest.mark.sampled(2)
@pytest.mark.filterwarnings("ignore:accumulate_grad_batches=2 weighs its batches equally")
@pytest.mark.parametrize("size", [1, 3, "auto"])
@pytest.mark.parametrize("hook", [halve, clamp, exchange, count])
@pytest.mark.parametrize("batches_a_step", [1, 2])
@pytest.mark.long
def test_they_get_each_gradient_once_with_all_micro_batches_in_it(
    hook: Hook, size: Any, batches_a_step: int
) -> None:
    """A factor was applied in each, to the gradients of those before it, too: weights were off by some percent."""
    options: dict[str, Any] = {"accumulate_grad_batches": batches_a_step}
    plain, split = fit(None, hook, **options), fit(size, hook, **options)
    torch.testing.assert_close(weights(split), weights(plain), rtol=1e-12, atol=1e-14)
    assert split.calls == plain.calls
    torch.testing.assert_close(split.sum, plain.sum, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("size", [1, 3, "auto"])
def test_an_optimizer_in_the_backward_steps_once_a_batch(size: Any) -> None:
    plain, split = fit(None, step_now, steps=False), fit(size, step_now, steps=False)
    assert not torch.equal(weights(plain), weights(fit(None, None, steps=False)))
    torch.testing.assert_close(weights(split), weights(plain), rtol=1e-12, atol=1e-14)


def test_the_hooks_are_where_they_were_after_a_fit() -> None:
    net = fit(3, halve)
    for parameter in net.parameters():
        parameter.grad = None
        hooks: Any = parameter._post_accumulate_grad_hooks
        (hook,) = hooks.values()
        assert hook.__qualname__.startswith("Net.__init__")
    expert: Any = net.experts[0]
    expert.weight.sum().backward()
    assert torch.equal(expert.weight.grad, torch.full((CLASSES, 6), 0.5, dtype=torch.float64))


def test_ranks_whose_gradients_are_reduced_after_a_hook_run_batches_whole() -> None:
    """A user's size that would split them is refused, and names the hook."""
    done = run_on_ranks("tests.plugins.complete_gradients_ranks")
    assert done.returncode == 0, done.stderr[-3000:]
    found = dict(
        line.split(maxsplit=1) for line in done.stdout.splitlines() if line.startswith(("differs", "said"))
    )
    assert float(found["differs"]) == 0
    assert "a hook on experts.0.weight, after its gradient" in found["said"]
    assert "on several ranks" in found["said"]
