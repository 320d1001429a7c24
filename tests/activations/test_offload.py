# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportOptionalMemberAccess=false
"""Activation offload on the device "fake": bytes of device and host, late copies, and bitwise gradients."""

import copy
import gc

import pytest
import torch
from torch import nn

from lightning_memkit import NoEffectWarning, checkpoint_modules
from lightning_memkit.activations.offload import offload_activations
from tests.activations.offload_models import DEPTH, LENGTH, ROWS, WIDTH, Deep, assert_same, gradients, ids
from tests.testing.fake_device import fake_device
from tests.testing.needs import NEEDS_COMPILER

pytestmark = NEEDS_COMPILER

INPUT = ROWS * LENGTH * WIDTH * 4
# A block's own: input, normalized, two of four times the width, the dropout's mask (kept in float32 here).
BLOCK = INPUT * (1 + 1 + 4 + 4 + 1)
SMALL = 4096


@pytest.fixture
def device():
    with fake_device() as device:
        yield device
        gc.collect()
        device.synchronize()
        assert device.hazards == 0
        assert device.pinned_bytes == 0
        assert device.pinned_reserved_bytes == 0


def build(device, **options):
    torch.manual_seed(0)
    return Deep(**options).to(device.torch_device).train()


def bytes_of_a_step(device, model, batch):
    """Device bytes that a forward keeps, and the peak of a step, both above what was there before."""
    model.zero_grad()
    device.synchronize()
    before = device.live_bytes
    device.reset_peak()
    out = model(batch)
    kept = device.live_bytes - before
    out.square().mean().backward()
    device.synchronize()
    return kept, device.peak_bytes - before


def test_the_device_keeps_one_block_and_the_host_the_others(device):
    model, batch = build(device), ids().to("fake")
    plain = gradients(model, batch)
    kept_without, peak_without = bytes_of_a_step(device, model, batch)
    undo = offload_activations(model, min_bytes=SMALL)
    for _ in range(3):
        assert_same(gradients(model, batch), plain)
    held = device.pinned_bytes
    device.reset_counts()
    kept, peak = bytes_of_a_step(device, model, batch)
    moved = device.transfers
    # All but the last block's bytes are away when the forward ends, and just those come back. The last block's, which
    # the backward needs first, are not even copied, once a pass has shown which block is the last.
    assert kept_without - kept >= (DEPTH - 1) * (BLOCK - INPUT)
    assert moved.to_host_bytes >= (DEPTH - 1) * (BLOCK - INPUT)
    assert moved.to_host_bytes == moved.to_device_bytes
    assert peak_without - peak >= (DEPTH - 3) * (BLOCK - INPUT)
    # Buffers are used again: the host holds what one step needs, whatever the number of steps.
    assert device.pinned_reserved_bytes == held == undo.counts.host_bytes
    assert moved.to_host_bytes <= held <= 1.13 * (moved.to_host_bytes + BLOCK)
    undo()
    assert device.pinned_bytes == 0
    assert bytes_of_a_step(device, model, batch) == (kept_without, peak_without)


def test_a_pass_with_more_blocks_than_the_last_copies_late(device):
    model, batch = build(device), ids().to("fake")
    plain = gradients(model, batch)

    def short():
        x = model.blocks[0](torch.ones(4, WIDTH).to("fake"))
        model.blocks[1](x).sum().backward()

    with offload_activations(model, min_bytes=SMALL) as offload:
        short()
        before = offload.counts.moved_bytes
        assert_same(
            gradients(model, batch), plain
        )  # the second block's were kept back, and copied when a third began
        assert offload.counts.moved_bytes - before >= DEPTH * (BLOCK - INPUT)


def test_a_second_backward_over_a_kept_graph_finds_everything(device):
    model, batch = build(device), ids().to("fake")
    plain = gradients(model, batch, backwards=3)
    with offload_activations(model, min_bytes=SMALL):
        assert_same(gradients(model, batch, backwards=3), plain)
        # Between the backwards the device does not fill up again.
        model.zero_grad()
        loss = model(batch).square().mean()
        before = device.live_bytes
        loss.backward(retain_graph=True)
        gradients_bytes = sum(p.grad.nbytes for p in model.parameters())
        assert device.live_bytes - before - gradients_bytes <= 4 * BLOCK
        del loss


def test_gradients_of_gradients(device):
    model = build(device, dropout=0.0)

    def penalty():
        model.zero_grad()
        x = torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH).to("fake").requires_grad_()
        out = x
        for block in model.blocks:
            out = block(out)
        (slope,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        slope.square().sum().backward()
        return [x.grad.cpu(), *(p.grad.cpu() for p in model.blocks.parameters() if p.grad is not None)]

    plain = penalty()
    with offload_activations(model, min_bytes=64) as offload:
        assert_same(penalty(), plain)
        assert offload.counts.moved_bytes > 0


@pytest.mark.parametrize("checkpoint_first", [True, False])
def test_checkpointed_blocks_keep_their_inputs_on_the_host(device, checkpoint_first):
    model, batch = build(device), ids().to("fake")
    plain = gradients(model, batch)
    if checkpoint_first:
        undo_checkpointing = checkpoint_modules(model)
        kept_without, _ = bytes_of_a_step(device, model, batch)
    offload = offload_activations(model, min_bytes=SMALL)
    if not checkpoint_first:
        undo_checkpointing = checkpoint_modules(model)
    for _ in range(2):
        assert_same(gradients(model, batch), plain)
    assert offload.counts.moved_bytes == (2 * DEPTH - 1) * INPUT  # in the second step the last one stays
    if checkpoint_first:
        kept, _ = bytes_of_a_step(device, model, batch)
        assert kept_without - kept == (DEPTH - 1) * INPUT
    undo_checkpointing()
    offload()
    assert_same(gradients(model, batch), plain)


def test_two_forwards_before_their_backwards(device):
    model, batches = build(device), [ids(seed=seed).to("fake") for seed in (1, 2)]

    def both(order):
        model.zero_grad()
        torch.manual_seed(0)
        losses = [model(batch).square().mean() for batch in batches]
        for index in order:
            losses[index].backward()
        return [p.grad.cpu() for p in model.parameters()]

    for order in ((0, 1), (1, 0)):
        plain = both(order)
        with offload_activations(model, min_bytes=SMALL):
            assert_same(both(order), plain)


def test_a_block_that_runs_several_times(device):
    class Shared(Deep):
        def forward(self, batch):
            x = self.embedding(batch)
            for _ in range(3):
                for block in self.blocks:
                    x = block(x)
            return self.head(x)

    torch.manual_seed(0)
    model, batch = Shared(depth=2).to("fake"), ids().to("fake")
    plain = gradients(model, batch)
    with offload_activations(model, min_bytes=SMALL) as offload:
        assert_same(gradients(model, batch), plain)
        assert offload.counts.visits == 6


def test_an_interrupted_step_leaves_nothing_behind(device):
    model, batch = build(device, depth=3), ids().to("fake")
    plain = gradients(model, batch)
    with offload_activations(model, min_bytes=SMALL):
        gradients(model, batch)
        model.zero_grad()
        gc.collect()
        device.synchronize()
        live = device.live_bytes
        device.reset_counts()
        gradients(model, batch)
        count = device.allocations
        survived = 0
        for point in range(0, count, 4):
            model.zero_grad()
            device.reset_counts()
            device.set_limits(fail_at=point)
            try:
                assert_same(gradients(model, batch), plain)
                survived += 1  # a prefetch failed: what it was to bring came later
            except torch.OutOfMemoryError:
                pass
            device.set_limits()
            model.zero_grad()
            device.synchronize()
            assert device.live_bytes == live, point
            assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
        assert 0 < survived < count // 4
        assert_same(gradients(model, batch), plain)


def test_past_the_cap_tensors_stay_and_it_is_said_once(device):
    model, batch = build(device), ids().to("fake")
    plain = gradients(model, batch)
    cap = 2 * BLOCK
    with offload_activations(model, min_bytes=SMALL, host_bytes=cap) as offload:
        with pytest.warns(UserWarning, match="Raise host_bytes"):
            gradients(model, batch)
        for _ in range(2):  # a warning would be an error from here on
            assert_same(gradients(model, batch), plain)
        counts = offload.counts
        assert device.pinned_reserved_peak_bytes <= cap
        assert counts.moved_bytes > 0
        assert counts.kept_bytes > 0


def test_shapes_that_change_do_not_grow_the_host(device):
    model = build(device)
    with offload_activations(model, min_bytes=SMALL) as offload:
        gradients(model, ids(length=LENGTH).to("fake"))
        most = offload.counts.host_bytes
        for length in (LENGTH - 1, LENGTH // 2, LENGTH - 7, LENGTH // 3):
            gradients(model, ids(length=length).to("fake"))
            assert device.pinned_reserved_bytes == offload.counts.host_bytes <= most


def test_a_tensor_that_all_blocks_share_travels_once(device):
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

        def forward(self, x, mask):
            left, right = self.linear(x).chunk(2, dim=-1)  # two views of one storage, both saved
            return x + torch.cat((left * right, right * left), dim=-1) * mask

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Masked() for _ in range(DEPTH))

        def forward(self, x):
            mask = (x * 2).detach()
            for block in self.blocks:
                x = block(x, mask)
            return x

    torch.manual_seed(0)
    model, x = Model().to("fake"), torch.randn(ROWS * LENGTH, WIDTH).to("fake")
    plain = gradients(model, x)
    with offload_activations(model, min_bytes=SMALL) as offload:
        assert_same(gradients(model, x), plain)
        # A block's input, the linear's output once, the product that the mask scales; the mask once in all.
        assert offload.counts.moved_bytes <= (2 * DEPTH + 1) * INPUT


def test_auto_checkpoints_the_blocks_whose_copies_do_not_hide(device, monkeypatch):
    from lightning_memkit.activations import offload
    from lightning_memkit.activations.offload_choice import CopyRates

    model, batch = build(device), ids().to("fake")
    plain = gradients(model, batch)
    slow, fast = (CopyRates(to_host=rate, to_device=rate) for rate in (1.0, 1e15))
    for rates, expected in ((slow, DEPTH - 1), (fast, 0)):
        monkeypatch.setattr(offload, "measure_copy_rates", lambda *_, rates=rates: rates)
        with offload_activations(model, min_bytes=SMALL, choose="auto") as handle:
            for step in range(5):
                assert handle.choices == () or step > 3
                assert_same(gradients(model, batch), plain)
            assert [choice.cost.name for choice in handle.choices] == [f"blocks.{i}" for i in range(DEPTH)]
            assert sum(choice.recompute for choice in handle.choices) == expected
            assert not handle.choices[-1].recompute
            before = handle.counts.moved_bytes
            gradients(model, batch)
            moved = handle.counts.moved_bytes - before
            assert (moved <= (DEPTH - 1) * INPUT + BLOCK) == bool(expected)
        assert all("forward" not in vars(block) for block in model.blocks)


def test_auto_measures_real_rates(device):
    model, batch = build(device), ids().to("fake")
    with offload_activations(model, min_bytes=SMALL, choose="auto") as handle:
        for _ in range(4):
            gradients(model, batch)
        assert all(choice.cost.forward_seconds > 0 for choice in handle.choices)
        assert all(choice.cost.moved_bytes >= BLOCK - INPUT for choice in handle.choices[:-1])
        assert handle.choices[-1].cost.moved_bytes == 0  # the last block's stay


def test_the_undo_restores_the_instances_and_what_a_backward_still_needs(device):
    model, batch = build(device), ids().to("fake")
    plain = gradients(model, batch)
    before = [dict(vars(module)) for module in model.modules()]
    undo = offload_activations(model, min_bytes=SMALL)
    model.zero_grad()
    torch.manual_seed(3)
    loss = model(batch).float().square().mean()
    undo()
    undo()
    assert [dict(vars(module)) for module in model.modules()] == before
    loss.backward()
    assert_same([loss.detach().cpu(), *(p.grad.cpu() for p in model.parameters())], plain)
    del loss


def test_copies_of_the_model_are_not_offloaded(device):
    model, batch = build(device), ids().to("fake")
    with offload_activations(model, min_bytes=SMALL) as offload:
        twin = copy.deepcopy(model)
        assert_same(gradients(twin, batch), gradients(copy.deepcopy(model), batch))
        assert offload.counts.visits == 0


def test_evaluation_moves_nothing(device):
    model, batch = build(device), ids().to("fake")
    with offload_activations(model, min_bytes=SMALL) as offload:
        with torch.no_grad():
            model(batch)
        assert offload.counts.visits == 0


def test_hooks_around_a_block_keep_their_word(device):
    model, batch = build(device), ids().to("fake")
    plain = gradients(model, batch)
    packed = []

    def pack(tensor):
        packed.append(tensor.nbytes)
        return tensor.detach()

    with offload_activations(model, min_bytes=SMALL) as offload:
        with (
            pytest.warns(NoEffectWarning, match="Block runs within other saved-tensor hooks") as caught,
            torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        ):
            assert_same(gradients(model, batch), plain)
        assert len(caught) == 1
        assert offload.counts.moved_bytes == 0
    assert sum(packed) > DEPTH * BLOCK


def test_hooks_within_a_block_keep_their_word(device):
    class Hooked(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner, self.first = inner, nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            x = self.first(x)
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach() * 1, lambda t: t):
                return self.inner(x)

    model, batch = build(device), ids().to("fake")
    model.blocks = nn.ModuleList(Hooked(block) for block in model.blocks).to("fake")
    plain = gradients(model, batch)
    with offload_activations(model, min_bytes=SMALL) as offload:
        assert_same(gradients(model, batch), plain)
        assert offload.counts.moved_bytes == DEPTH * INPUT


def test_on_the_host_it_says_that_nothing_is_saved(device):
    model = Deep()
    with offload_activations(model, min_bytes=SMALL) as offload:
        with pytest.warns(NoEffectWarning, match="in the host's memory already.*checkpoint_modules"):
            gradients(model, ids())
        gradients(model, ids())  # said once: a warning would be an error
        assert offload.counts.moved_bytes == 0


def test_a_model_without_blocks_is_said():
    with pytest.warns(NoEffectWarning, match="No repeated blocks were found in Linear"):
        offload_activations(nn.Linear(2, 2))()
    with pytest.warns(NoEffectWarning, match=r"6 Block \(blocks\.0, \.\.\.\)"):
        offload_activations(Deep(), blocks=["Attention"])()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_bytes": "much"}, "'much' is not a size"),
        ({"host_bytes": -1}, "-1 is not a size"),
        ({"choose": "best"}, "choose='best' is unknown"),
        ({"blocks": "Block"}, r"write blocks=\['Block'\]"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        offload_activations(Deep(), **options)


def test_a_block_is_there_before_its_backward_begins(device, monkeypatch):
    from lightning_memkit.activations.offload_visits import Traffic

    model, batch = build(device), ids().to("fake")
    there, stock = [], Traffic._arrive

    def arrive(self, visit):
        if not self._recent or self._recent[-1]() is not visit:
            there.append([parcel._resident is not None for parcel in visit.parcels])
            before = visit.previous() if visit.previous is not None else None
            farther = before.previous() if before is not None and before.previous is not None else None
            if farther is not None:  # no more than one block ahead
                own = [p for p in farther.parcels if p not in before.parcels]
                assert all(parcel._resident is None for parcel in own)
        stock(self, visit)

    monkeypatch.setattr(Traffic, "_arrive", arrive)
    with offload_activations(model, min_bytes=SMALL):
        gradients(model, batch)
    assert len(there) == DEPTH
    assert all(all(parcels) for parcels in there)
