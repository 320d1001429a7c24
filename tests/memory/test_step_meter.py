"""A whole metered step: operations against torch's counter, the timeline against the peak, kinds and modules."""

from collections import Counter
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from lightning_memkit.activations.checkpointing import checkpoint_modules
from lightning_memkit.memory.anatomy import CATEGORIES
from lightning_memkit.memory.kinds import KINDS, kind_of
from lightning_memkit.memory.step_meter import MeteredStep, StepMeter
from lightning_memkit.memory.timeline import timeline_of
from lightning_memkit.testing import fail_at

ROWS, WIDTH = 24, 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 128), nn.Linear(128, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, again: bool = False) -> None:
        super().__init__()
        self.stem = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 50)
        self.again = again

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x.T[None])[0].T
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.again else block(x)  # pyright: ignore
        return self.head(x)


def metered(model: nn.Module, optimizer: Any, *, parts: int = 1) -> tuple[MeteredStep, StepMeter]:
    x, labels = torch.randn(ROWS, WIDTH), torch.arange(ROWS) % 50
    meter = StepMeter(model)
    meter.track(model.parameters(), "weights")
    meter.track([p.grad for p in model.parameters() if p.grad is not None], "gradients")
    meter.track([x, labels], "inputs")
    meter.track((t for state in optimizer.state.values() for t in state.values()), "optimizer_states")
    optimizer.zero_grad()
    with meter:
        for _ in range(parts):
            meter.phase = "forward"
            loss = F.cross_entropy(model(x), labels)
            meter.end_forward()
            loss.backward()
            del loss
        meter.phase = "optimizer"
        optimizer.step()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    states = [t for state in optimizer.state.values() for t in state.values()]
    return meter.step(gradients=gradients, optimizer_states=states), meter


def counted_by_torch(model: nn.Module, parts: int = 1) -> int:
    x, labels = torch.randn(ROWS, WIDTH), torch.arange(ROWS) % 50
    with FlopCounterMode(display=False) as counter:
        for _ in range(parts):
            F.cross_entropy(model(x), labels).backward()
    model.zero_grad()
    return counter.get_total_flops()


def test_operations_are_those_that_torch_counts_in_all_parts_of_a_step() -> None:
    model = Model()
    for parts in (1, 3):
        expected = counted_by_torch(model, parts)
        _, meter = metered(model, torch.optim.AdamW(model.parameters()), parts=parts)
        found = meter.flops.total(samples=ROWS)
        assert found.model == expected > 1_000_000
        assert found.again == 0
        assert found.share_16_bit == 0


def test_what_is_made_again_is_told_from_what_the_model_needs() -> None:
    plain, again = counted_by_torch(Model()), counted_by_torch(Model(again=True))
    assert again > plain
    by_torch, by_tape, by_block = Model(again=True), Model(), Model()
    undo = [checkpoint_modules(by_tape, policy="selective"), checkpoint_modules(by_block, policy="full")]
    for model, expected in ((by_torch, again), (by_block, again), (by_tape, None)):
        _, meter = metered(model, torch.optim.SGD(model.parameters(), lr=0.1))
        found = meter.flops.total()
        assert found.model == plain
        assert found.again == (counted_by_torch(model) - plain if expected is None else expected - plain)
    for give_back in undo:
        give_back()


@pytest.mark.parametrize("heads_of_keys", [4, 2, 1])
def test_keys_that_several_queries_share_count_for_each(heads_of_keys: int) -> None:
    batch, heads, length, width = 2, 4, 8, 16
    query = torch.randn(batch, heads, length, width, requires_grad=True)
    key, value = torch.randn(2, batch, heads_of_keys, length, width, requires_grad=True)
    with StepMeter(Model()) as meter:
        meter.phase = "forward"
        out = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=heads_of_keys < heads
        )
        meter.phase = "backward"
        out.sum().backward()
    product = 2 * batch * heads * length * length * width  # two of them forward, five backward
    assert meter.flops.total().model == 7 * product


def test_operands_of_16_bits_are_told() -> None:
    model = Model().bfloat16()
    x = torch.randn(ROWS, WIDTH, dtype=torch.bfloat16)
    with StepMeter(model) as meter:
        meter.phase = "forward"
        model(x).sum()
        torch.mm(torch.ones(4, 4), torch.ones(4, 4))
    found = meter.flops.total(tokens=ROWS)
    small = 2 * 4**3
    assert found.share_16_bit == pytest.approx(1 - small / found.model)
    assert found.units == ROWS
    expected = (found.model - small) / 1e6 + small / 1e5
    assert found.seconds_at(1e6, 1e5) == pytest.approx(expected)


@pytest.mark.parametrize("parts", [1, 4])
def test_the_timeline_has_the_peak_and_its_categories_add_up_at_each_moment(parts: int) -> None:
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        step, meter = metered(model, optimizer, parts=parts)
    timeline, anatomy = step.timeline, step.anatomy
    totals = timeline.totals
    assert max(totals) == totals[timeline.peak_index] == anatomy.peak_bytes == meter.peak_bytes
    at_peak = {name: column[timeline.peak_index] for name, column in timeline.category_bytes.items()}
    assert at_peak == {name: size for name, size in anatomy.at_peak.items() if name in at_peak}
    for name, column in timeline.category_bytes.items():
        assert max(column) == anatomy.largest[name]
    # Each moment once more, by counting what lives then.
    for index, tick in enumerate(timeline.ticks):
        alive = sum(one.size_bytes for one in meter.records if one.alive_at(tick))
        assert totals[index] == alive
    assert list(timeline.ticks) == sorted(set(timeline.ticks))
    shown = [phase for phase, _ in timeline.phases if phase != "outside"]
    assert shown == ["forward", "backward"] * parts + ["optimizer"]
    assert timeline.operators[timeline.operator_at[timeline.peak_index]] == anatomy.peak_operator
    assert timeline.modules[timeline.module_at[timeline.peak_index]] == anatomy.peak_module
    assert set(timeline.category_bytes) <= set(CATEGORIES)


def test_what_follows_the_last_backward_is_no_forward() -> None:
    """A callback can't know that no further micro-batch comes: what looks at the gradients then was the forward's."""
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    meter = StepMeter(model)
    meter.track(model.parameters(), "weights")
    with meter:
        for _ in range(2):
            meter.phase = "forward"
            loss = F.cross_entropy(model(torch.randn(ROWS, WIDTH)), torch.arange(ROWS) % 50)
            meter.end_forward()
            loss.backward()
            meter.phase = "forward"
        largest = torch.stack(
            [p.grad.flatten().repeat(99).amax() for p in model.parameters() if p.grad is not None]
        )
        assert largest.isfinite().all()
        meter.phase = "optimizer"
        optimizer.step()
    step = meter.step(
        gradients=[p.grad for p in model.parameters() if p.grad is not None], optimizer_states=()
    )
    shown = [phase for phase, _ in step.timeline.phases if phase != "outside"]
    assert shown == ["forward", "backward"] * 2 + ["optimizer"]
    assert step.anatomy.peak_phase == "optimizer"


def test_a_long_step_keeps_its_peak_in_few_moments() -> None:
    model = Model()
    step, meter = metered(model, torch.optim.AdamW(model.parameters()), parts=3)
    long = timeline_of(meter.records, meter.sums, CATEGORIES)
    short = timeline_of(meter.records, meter.sums, CATEGORIES, most=20)
    assert len(short.ticks) <= 21 < len(long.ticks)
    assert max(short.totals) == step.anatomy.peak_bytes
    assert short.ticks[-1] == long.ticks[-1]


@pytest.mark.parametrize("most", [25, 4000])
def test_each_moment_names_the_modules_that_take_most(most: int) -> None:
    model = Model()
    _, meter = metered(model, torch.optim.AdamW(model.parameters()), parts=2)
    timeline = timeline_of(meter.records, meter.sums, CATEGORIES, most=most)
    assert len(timeline.largest_modules) == len(timeline.ticks)
    created = [one for one in meter.records if one.maker is not None]
    for tick, found in zip(timeline.ticks, timeline.largest_modules, strict=True):
        alive: Counter[str] = Counter()
        for one in created:
            alive[one.origin] += one.size_bytes * one.alive_at(tick)
        sizes = sorted((size for size in alive.values() if size), reverse=True)
        assert [size for _, size in found] == sizes[:3]
        assert all(alive[timeline.modules[index]] == size for index, size in found)
    assert any(
        "blocks.1.up" == timeline.modules[index] for one in timeline.largest_modules for index, _ in one
    )


def test_bytes_by_kind_and_module_are_those_known_by_hand() -> None:
    model = Model()
    step, _ = metered(model, torch.optim.SGD(model.parameters(), lr=0.1, foreach=False))
    saved = {kind: found.saved_at_most for kind, found in step.kinds.items()}
    assert set(saved) == set(KINDS)
    assert sum(saved.values()) == step.anatomy.largest["saved_activations"]
    assert (
        sum(found.saved_at_peak for found in step.kinds.values()) == step.anatomy.at_peak["saved_activations"]
    )
    value = ROWS * 4
    # The sum of stem or block that norm reads, GELU's result; norm's result with mean and rstd; up's result.
    block = value * (128 + WIDTH)
    assert saved["normalization"] == 3 * value * (WIDTH + 2) + value * 50  # and the loss's logarithms
    assert step.modules["blocks.1.up"].saved_at_most == value * 128
    assert step.modules["blocks.1"].saved_at_most == block
    assert step.modules["blocks.1.norm"].saved_at_most == value * (WIDTH + 2)
    assert step.modules["head"].allocated >= value * 50 + 4 * (WIDTH + 1) * 50  # its result, its gradients
    assert max(step.modules.values(), key=lambda one: one.saved_at_most) is next(iter(step.modules.values()))


def test_kinds_of_operators() -> None:
    aten = torch.ops.aten
    for kind, operators in {
        "contraction": (
            aten.mm.default, aten.addmm.default, aten.bmm.default, aten.convolution.default,
            aten.convolution_backward.default, aten._scaled_dot_product_flash_attention.default,
            aten._scaled_dot_product_flash_attention_for_cpu_backward.default, aten.mkldnn_rnn_layer.default,
        ),
        "normalization": (
            aten.native_layer_norm.default, aten.native_batch_norm_backward.default, aten._softmax.default,
            aten._log_softmax_backward_data.default, aten.native_group_norm.default,
        ),
        "elementwise": (
            aten.gelu.default, aten.mul.Tensor, aten._to_copy.default, aten.native_dropout.default,
            aten._foreach_add_.Scalar, aten.threshold_backward.default, aten.clone.default,
        ),
        "other": (
            aten.embedding.default, aten.sum.default, aten.cat.default, aten.empty_like.default,
            aten.linalg_vector_norm.default, aten._foreach_norm.Scalar, aten.nll_loss_forward.default,
        ),
    }.items():  # fmt: skip
        assert {operator: kind_of(operator) for operator in operators} == dict.fromkeys(operators, kind)


@pytest.mark.parametrize("is_below", [True, False])  # as an allocator is, or as a budget that also counts
@pytest.mark.parametrize("index", [0, 7, 30, 60])
def test_a_step_out_of_memory_tells_what_lived_and_a_retry_counts_anew(index: int, is_below: bool) -> None:
    model = Model()
    x, labels = torch.randn(ROWS, WIDTH), torch.arange(ROWS) % 50
    alone, _ = metered(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model.zero_grad()
    meter = StepMeter(model)
    meter.track(model.parameters(), "weights")
    meter.track([x, labels], "inputs")

    def step() -> None:
        meter.phase = "forward"
        loss = F.cross_entropy(model(x), labels)
        meter.end_forward()
        loss.backward()
        meter.phase = "optimizer"

    faults, failed, live = fail_at(index, armed=False), None, 0
    with ExitStack() as stack:
        for mode in (faults, meter) if is_below else (meter, faults):
            stack.enter_context(mode)  # pyright: ignore[reportArgumentType]
        faults.arm()
        try:
            step()
        except torch.OutOfMemoryError:
            failed = meter.failed_step(gradients=(), optimizer_states=())
            live = meter.live_bytes
        faults.disarm()
        model.zero_grad()
        step()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert failed is not None
    assert failed.timeline.failed_at == len(failed.timeline.ticks) - 1
    assert sum(failed.anatomy.at_peak.values()) == failed.anatomy.peak_bytes == failed.timeline.totals[-1]
    assert failed.anatomy.peak_bytes >= live  # what C++ had in hand is gone by now
    assert faults.fault is not None
    assert failed.anatomy.peak_operator == faults.fault.operator
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    again = meter.step(gradients=gradients, optimizer_states=())
    assert again.anatomy.peak_bytes == alone.anatomy.peak_bytes
    assert meter.flops.total().model == counted_by_torch(model)
