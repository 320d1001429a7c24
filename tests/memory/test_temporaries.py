# pyright: reportAttributeAccessIssue=false, reportArgumentType=false
"""Each lint of a step: what it must name, with its bytes and line, and what it must leave alone."""

import inspect
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_memkit.memory.findings import Finding, fragmentation
from lightning_memkit.memory.temporaries import TemporariesMeter

CLASSES, TOKENS, WIDTH = 512, 64, 32
LEAST = 8192


def line_of(function: Callable, text: str) -> str:
    """`file:line` of the one line of a function that has a text."""
    lines, start = inspect.getsourcelines(function)
    (index,) = [i for i, line in enumerate(lines) if text in line]
    return f"test_temporaries.py:{start + index}"


def step(
    forward: Callable[[nn.Module], torch.Tensor],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    zero: Callable[[], None] | None = None,
) -> list[Finding]:
    """The findings of the second step, in Lightning's order: forward, zero_grad, backward, optimizer."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    for measured in (False, True):
        meter = TemporariesMeter(least_bytes=LEAST)
        meter.track(model.parameters(), "weights")
        meter.track([p.grad for p in model.parameters() if p.grad is not None], "gradients")
        if measured:
            meter.__enter__()
        meter.phase = "forward"
        loss = forward(model)
        meter.end_forward()
        (zero or optimizer.zero_grad)()
        loss.backward()
        del loss
        meter.phase = "optimizer"
        optimizer.step()
        if measured:
            meter.__exit__(None, None, None)
    states = [t for state in optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)]
    meter.dissect(gradients=[p.grad for p in model.parameters()], optimizer_states=states)
    return meter.findings()


def head(dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    return nn.Linear(WIDTH, CLASSES, bias=False).to(dtype)


def labels() -> torch.Tensor:
    return torch.arange(TOKENS) % CLASSES


# Upcast logits


def upcast(model: nn.Module) -> torch.Tensor:
    logits = model(torch.ones(TOKENS, WIDTH, dtype=torch.bfloat16))
    return F.cross_entropy(logits.float(), labels())


def shifted_and_capped(model: nn.Module) -> torch.Tensor:
    logits = model(torch.ones(1, TOKENS, WIDTH, dtype=torch.bfloat16)).float()
    logits = 30 * torch.tanh(logits / 30)
    logits = logits[:, :-1].contiguous().view(-1, CLASSES)
    return F.cross_entropy(logits, labels()[1:])


def autocast(model: nn.Module) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return F.cross_entropy(model(torch.ones(TOKENS, WIDTH)), labels())


@pytest.mark.parametrize(
    ("forward", "dtype", "line"),
    [
        (upcast, torch.bfloat16, "F.cross_entropy(logits.float()"),
        (shifted_and_capped, torch.bfloat16, "F.cross_entropy(logits, "),
        (autocast, torch.float32, "F.cross_entropy(model("),
    ],
)
def test_upcast_logits_are_named(forward, dtype, line) -> None:
    (found,) = step(forward, head(dtype))
    assert found.kind == "logits_upcast"
    assert "512 classes" in found.what
    # The float32 copy, and the loss's own of the same size.
    assert found.size_bytes >= 2 * (TOKENS - 1) * CLASSES * 4
    assert found.where.endswith(line_of(forward, line))
    assert "linear_cross_entropy" in found.remedy


def low_precision_loss(model: nn.Module) -> torch.Tensor:
    return F.cross_entropy(model(torch.ones(TOKENS, WIDTH, dtype=torch.bfloat16)), labels())


def upcast_of_hidden_states(model: nn.Module) -> torch.Tensor:
    return model(torch.ones(TOKENS, WIDTH, dtype=torch.bfloat16)).float().square().mean()


def small(model: nn.Module) -> torch.Tensor:
    return F.cross_entropy(model(torch.ones(1, WIDTH, dtype=torch.bfloat16)).float(), labels()[:1])


@pytest.mark.parametrize("forward", [low_precision_loss, upcast_of_hidden_states, small])
def test_a_loss_without_a_large_upcast_is_left_alone(forward) -> None:
    assert step(forward, head()) == []


# Foreach copies


def many() -> nn.Module:
    return nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))


def plain(model: nn.Module) -> torch.Tensor:
    return model(torch.ones(2, 64)).square().mean()


def test_foreach_copies_of_the_optimizer_are_named() -> None:
    model = many()
    (found,) = step(plain, model, torch.optim.AdamW(model.parameters(), foreach=True))
    assert found.kind == "foreach_copies"
    assert found.size_bytes == 4 * 64 * 64 * 4  # one square root a parameter, all at once
    assert found.where == "the optimizer's step"
    assert "fused=True" in found.remedy


@pytest.mark.parametrize("options", [{"foreach": False}, {"fused": True}])
def test_an_optimizer_without_foreach_copies_is_left_alone(options) -> None:
    model = many()
    assert step(plain, model, torch.optim.AdamW(model.parameters(), **options)) == []


def test_foreach_in_place_only_is_left_alone() -> None:
    model = many()
    assert step(plain, model, torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)) == []


# Dense masks

ROWS, HEADS, LENGTH = 2, 2, 64


def rows(model: nn.Module) -> torch.Tensor:
    return model(torch.ones(ROWS, HEADS, LENGTH, 8))


def sdpa_mask(model: nn.Module) -> torch.Tensor:
    x = rows(model)
    mask = torch.zeros(ROWS, 1, LENGTH, LENGTH).masked_fill(torch.ones(LENGTH, LENGTH).triu(1) > 0, -9e9)
    return F.scaled_dot_product_attention(x, x, x, attn_mask=mask).mean()


def eager_mask(model: nn.Module) -> torch.Tensor:
    x = rows(model)
    mask = torch.full((ROWS, 1, LENGTH, LENGTH), -9e9).triu(1)
    return ((x @ x.mT + mask).softmax(-1) @ x).mean()


def filled_mask(model: nn.Module) -> torch.Tensor:
    x = rows(model)
    mask = torch.ones(ROWS * 2, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
    return ((x.repeat(2, 1, 1, 1) @ x.mT.repeat(2, 1, 1, 1)).masked_fill(mask, -9e9).softmax(-1)).mean()


@pytest.mark.parametrize(
    ("forward", "size", "line"),
    [
        (sdpa_mask, ROWS * LENGTH * LENGTH * 4, "mask = torch.zeros("),
        (eager_mask, ROWS * LENGTH * LENGTH * 4, "mask = torch.full("),
        (filled_mask, 2 * ROWS * LENGTH * LENGTH, "mask = torch.ones("),
    ],
)
def test_dense_masks_are_named(forward, size, line) -> None:
    found = [finding for finding in step(forward, nn.Linear(8, 8)) if finding.kind == "dense_mask"]
    assert len(found) == 1
    assert found[0].size_bytes == size
    assert str([ROWS if forward is not filled_mask else 2 * ROWS, 1, LENGTH, LENGTH]) in found[0].what
    assert found[0].where.endswith(line_of(forward, line))
    assert "is_causal=True" in found[0].remedy


def causal(model: nn.Module) -> torch.Tensor:
    x = rows(model)
    return F.scaled_dot_product_attention(x, x, x, is_causal=True).mean()


def expanded(model: nn.Module) -> torch.Tensor:
    x = rows(model)
    mask = torch.zeros(64, 1, 1, LENGTH)[:ROWS].expand(-1, -1, LENGTH, -1)  # padding: a value a key
    return F.scaled_dot_product_attention(x, x, x, attn_mask=mask).mean()


def one_head(model: nn.Module) -> torch.Tensor:
    x = model(torch.ones(8, 1, LENGTH, 8))
    return ((x @ x.mT).add(1.0).softmax(-1) @ x).mean()


@pytest.mark.parametrize("forward", [causal, expanded, one_head])
def test_attention_without_a_dense_mask_is_left_alone(forward) -> None:
    assert [f for f in step(forward, nn.Linear(8, 8)) if f.kind == "dense_mask"] == []


# Zeroed gradients


def test_zeroed_gradients_are_named() -> None:
    for foreach in (False, True):
        model = many()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=foreach)

        def zero(optimizer=optimizer) -> None:
            optimizer.zero_grad(set_to_none=False)

        (found,) = step(plain, model, optimizer, zero)
        assert found.kind == "zeroed_gradients"
        assert found.size_bytes == 4 * 64 * 64 * 4
        assert found.where.endswith(line_of(test_zeroed_gradients_are_named, "zero_grad(" + "set_to"))


def test_other_tensors_may_be_zeroed() -> None:
    def forward(model: nn.Module) -> torch.Tensor:
        return model(torch.empty(64, 64).zero_() + 1).square().mean()

    assert step(forward, many()) == []


# Fragmentation


def test_fragmentation_is_what_was_reserved_and_never_in_use() -> None:
    found = fragmentation({"reserved_bytes.all.peak": 10 << 30, "allocated_bytes.all.peak": 8 << 30})
    assert found is not None
    assert found.size_bytes == 2 << 30
    assert "expandable_segments:True" in found.remedy


@pytest.mark.parametrize("stats", [{}, {"reserved_bytes.all.peak": 1000, "allocated_bytes.all.peak": 900}])
def test_little_slack_or_no_such_allocator_is_no_finding(stats) -> None:
    assert fragmentation(stats) is None


def test_a_finding_is_one_line() -> None:
    found = Finding(
        kind="dense_mask", what="A mask", size_bytes=2 << 20, where="model.py:3", remedy="drop it"
    )
    assert str(found) == "A mask: 2.00 MiB, model.py:3; drop it"
