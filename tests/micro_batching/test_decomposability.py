import pytest
import torch
from torch import Tensor, nn

from lightning_memkit.micro_batching.proof.decomposability import judge, sampled_gradient


def gradients(loss_of, batch: Tensor) -> tuple[Tensor, list[Tensor]]:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()

    def gradient(part: Tensor) -> Tensor:
        model.zero_grad()
        loss_of(model(part)).backward()
        return sampled_gradient(model.parameters())

    return gradient(batch), [gradient(batch[:2]), gradient(batch[2:])]


def contrastive(out: Tensor) -> Tensor:
    out = nn.functional.normalize(out)
    return nn.functional.cross_entropy(out @ out.roll(1, 1).T / 0.1, torch.arange(len(out)))


@pytest.mark.parametrize(
    ("loss_of", "word"),
    [
        (lambda out: out.square().mean(), ""),
        (lambda out: out.square().sum(), "sum over its samples"),
        (contrastive, "act on each other"),
        (lambda out: out.square().sum() / len(out) ** 2, "mean over something else"),
    ],
)
def test_each_kind_of_loss_gets_its_cause(loss_of, word: str) -> None:
    whole, parts = gradients(loss_of, torch.randn(5, 6, dtype=torch.float64))
    verdict = judge(whole, parts, [0.4, 0.6], allowed=1e-9)
    assert verdict.adds_up == (word == "")
    assert word in verdict.cause
    assert bool(verdict.remedy) == (word != "")
    if word:
        assert verdict.relative_error > 0.01


def test_nan_never_adds_up() -> None:
    nan = torch.full((3,), float("nan"), dtype=torch.float64)
    assert not judge(torch.ones(3, dtype=torch.float64), [nan, nan], [0.5, 0.5], 1e-3).adds_up
