# pyright: reportArgumentType=false, reportOptionalMemberAccess=false
"""Rows of an embedding under low-bit states: torchao's 8-bit ones blow up on Zipf's tokens (ao#1218), ours stay."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import bitsandbytes as bnb
import pytest
import torch
import torchao.optim
from torch import Tensor, nn
from torch.nn import Parameter, functional
from torch.optim import Optimizer

from lightning_memkit.initialization.casting import cast_inputs, cast_module
from lightning_memkit.optim.compensation import compensate
from lightning_memkit.optim.eight_bit import adapt_bitsandbytes

VOCABULARY, WIDTH, BATCH, STEPS = 1024, 16, 128, 100
OPTIONS = {"lr": 1e-3, "weight_decay": 0.1, "betas": (0.9, 0.999)}
BF16 = torch.bfloat16


class NextToken(nn.Module):
    """Small, and each gradient of its embedding has 94 % zeros and spans eight orders of magnitude."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.mix, self.head = nn.Linear(WIDTH, 64), nn.Linear(64, VOCABULARY)
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mix(self.embedding(tokens))))


def tokens(step: int) -> Tensor:
    """Zipf's law; frequent and rare tokens lie beside each other, as in a vocabulary."""
    frequencies = 1 / torch.arange(1, VOCABULARY + 1).float() ** 1.1
    order = torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(99))
    generator = torch.Generator().manual_seed(step)
    return order[torch.multinomial(frequencies, BATCH, replacement=True, generator=generator)]


def train(model: NextToken, optimizer: Optimizer, gradients: list[Tensor] | None = None) -> Tensor:
    """The rows' norms after training; the embedding's gradients are collected in bfloat16."""
    for step in range(STEPS):
        batch = tokens(step)
        optimizer.zero_grad()
        functional.cross_entropy(model(batch).float(), (7 * batch + 3) % VOCABULARY).backward()
        if gradients is not None:
            gradients.append(model.embedding.weight.grad.to(BF16))
        optimizer.step()
    return norms(model.embedding.weight)


def norms(weight: Tensor) -> Tensor:
    return weight.detach().float().norm(dim=1)


def new_model() -> NextToken:
    torch.manual_seed(0)
    return NextToken()


def eager() -> AbstractContextManager:
    """torchao compiles its step, which takes a minute and changes nothing about it."""
    return torch.compiler.set_stance("force_eager")


@pytest.fixture(scope="module")
def float32() -> tuple[Tensor, list[Tensor]]:
    """The rows' norms of torch's AdamW in float32, and the gradients of its embedding."""
    model, gradients = new_model(), []
    return train(model, torch.optim.AdamW(model.parameters(), **OPTIONS), gradients), gradients


def from_given_gradients(gradients: list[Tensor], make: Callable[[NextToken], Optimizer]) -> Tensor:
    model = new_model()
    del model.mix, model.head
    optimizer = make(model)
    weight = model.embedding.weight
    for gradient in gradients:
        weight.grad = gradient.to(weight.dtype)
        optimizer.step()
    return norms(weight)


def memkit(model: NextToken, mode: str, states: str, kind: str) -> Optimizer:
    low_halves: dict[Parameter, Tensor] = {}
    cast_module(model, BF16, low_halves=low_halves)
    cast_inputs(model, BF16)
    cls = torch.optim.AdamW if kind == "AdamW" else bnb.optim.AdamW8bit
    optimizer = cls(model.parameters(), **OPTIONS)
    if kind != "AdamW":
        adapt_bitsandbytes(optimizer, model, keep_at_risk=kind == "AdamW8bit")
    compensate(optimizer, mode=mode, states=states, low_halves=low_halves)
    return optimizer


OURS = [
    ("kahan", "compact", "AdamW"),
    ("split", "compact", "AdamW"),
    ("kahan", "compact", "AdamW8bit"),
    ("split", "compact", "AdamW8bit"),
    ("split", "exact", "AdamW8bit"),
]


@pytest.mark.parametrize(("mode", "states", "kind"), OURS)
def test_from_the_same_gradients_every_row_is_float32s_within_a_hundredth(float32, mode, states, kind):
    gradients = float32[1]
    truth = from_given_gradients(gradients, lambda m: torch.optim.AdamW(m.parameters(), **OPTIONS))
    ours = from_given_gradients(gradients, lambda m: memkit(m, mode, states, kind))
    assert ((ours - truth).abs() / truth).max() < 0.01


def test_from_the_same_gradients_8_bits_do_harm(float32):
    """The controls: torchao's rows blow up; bitsandbytes' do not, and are a fifth off."""
    gradients = float32[1]
    truth = from_given_gradients(gradients, lambda m: torch.optim.AdamW(m.parameters(), **OPTIONS))
    with eager():
        torchaos = from_given_gradients(
            gradients, lambda m: torchao.optim.AdamW8bit(m.parameters(), **OPTIONS)
        )
    assert torchaos.max() > 100 * truth.max()
    everything = from_given_gradients(
        gradients, lambda m: memkit(m, "split", "exact", "AdamW8bit without exceptions")
    )
    assert ((everything - truth).abs() / truth).max() > 0.1


@pytest.mark.parametrize(("mode", "states", "kind"), OURS)
def test_trained_through_the_model_norms_are_float32s_within_a_hundredth(float32, mode, states, kind):
    """Largest row and whole embedding: the gradients are those of bfloat16 weights here, and differ."""
    truth = float32[0]
    model = new_model()
    ours = train(model, memkit(model, mode, states, kind))
    assert abs(ours.max() / truth.max() - 1) < 0.01
    assert abs(ours.norm() / truth.norm() - 1) < 0.01


def test_trained_through_the_model_torchaos_rows_blow_up(float32):
    model = new_model()
    with eager():
        torchaos = train(model, torchao.optim.AdamW8bit(model.parameters(), **OPTIONS))
    assert torchaos.max() > 100 * float32[0].max()
