"""Released gradients against the same optimizer's whole steps, torch's own where nothing is compensated."""

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import schedulefree
import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from lightning_memkit.memory.meter import ByteMeter
from lightning_memkit.optim.compensation import compensate
from lightning_memkit.optim.gradient_release import Release, release_gradients, release_of
from tests.optim.helpers import MATRICES_ONLY, OPTIMIZERS, all_tensors, assert_same_bits

Groups = list[dict[str, Any]]
BUILD: dict[str, Callable[..., Optimizer]] = OPTIMIZERS | {
    "ScheduleFree": lambda groups: schedulefree.AdamWScheduleFree(groups, lr=1e-2, warmup_steps=3),
}


class Net(nn.Module):
    """Layers of several sizes; the first and the last share their weight."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 12)
        self.body = nn.ModuleList(nn.Linear(12, 12, bias=bias) for _ in range(4))
        self.head = nn.Linear(12, 20, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.table(tokens)
        for layer in self.body:
            hidden = hidden + layer(hidden).tanh()
        return nn.functional.cross_entropy(
            self.head(hidden).float().flatten(0, 1), tokens.roll(1, 1).flatten()
        )


def groups_of(net: nn.Module) -> Groups:
    parameters = list(net.parameters())
    return [{"params": parameters[:3]}, {"params": parameters[3:], "lr": 5e-3}]


def tokens_of(step: int) -> torch.Tensor:
    return torch.randint(0, 20, (3, 5), generator=torch.Generator().manual_seed(step))


def train(
    net: nn.Module,
    optimizer: Optimizer,
    release: Release | None = None,
    max_norm: float | None = None,
    steps: range = range(6),
) -> None:
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    for step in steps:
        loss = net(tokens_of(step))
        if release is not None and max_norm is not None:
            norm = release.measured_norm(lambda loss=loss: loss.backward(retain_graph=True))
            release.clip_next_step(max_norm, norm)
        loss.backward()
        if release is None and max_norm is not None:
            torch.nn.utils.clip_grad_norm_(net.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()


def trained_pair(
    build: Callable[[Groups], Optimizer],
    *,
    mode: Any = None,
    states: Any = "compact",
    bundle_bytes: int = 0,
    max_norm: float | None = None,
    bias: bool = True,
) -> list[list[torch.Tensor]]:
    """All tensors after training without release and with it."""
    torch.manual_seed(0)
    first = Net(bias).to(torch.bfloat16 if mode else torch.float32)
    found = []
    for net, releases in ((copy.deepcopy(first), False), (first, True)):
        optimizer = build(groups_of(net))
        if mode:
            compensate(optimizer, mode=mode, states=states)
        if isinstance(optimizer, schedulefree.AdamWScheduleFree):
            optimizer.train()
        release = release_gradients(optimizer, bundle_bytes=bundle_bytes) if releases else None
        train(net, optimizer, release, max_norm)
        options = [torch.tensor(g["lr"], dtype=torch.float64) for g in optimizer.param_groups]
        found.append(all_tensors(optimizer) + options)
    return found


@pytest.mark.parametrize("name", BUILD)
def test_bitwise_the_optimizers_own_step(name):
    assert_same_bits(*trained_pair(BUILD[name], bias=name not in MATRICES_ONLY))


@pytest.mark.parametrize("bundle_bytes", [0, 1000, 1 << 20])
@pytest.mark.parametrize(
    ("mode", "states"),
    [
        *((mode, "compact") for mode in ("kahan", "split", "split24", "stochastic", "none")),
        ("split24", "8-bit"),
    ],
)
@pytest.mark.usefixtures("short_rows")
def test_bitwise_the_compensated_step(mode, states, bundle_bytes):
    build = BUILD["AdamW-single"]
    assert_same_bits(*trained_pair(build, mode=mode, states=states, bundle_bytes=bundle_bytes, max_norm=0.5))


@pytest.mark.parametrize("name", ["ScheduleFree", "Adafactor", "SGD"])
def test_bitwise_the_compensated_step_of_other_optimizers(name):
    assert_same_bits(*trained_pair(BUILD[name], mode="split", states="exact"))


@pytest.mark.parametrize("max_norm", [0.1, 1e3])
def test_clipping_by_the_measured_norm_is_torchs(max_norm):
    pair = trained_pair(BUILD["SGD"], max_norm=max_norm)
    assert_same_bits(*pair)
    free = trained_pair(BUILD["SGD"])[0]
    assert torch.equal(pair[0][0], free[0]) == (max_norm > 100)  # 0.1 clips


def test_the_measured_norm_of_mixed_dtypes_is_torchs_and_leaves_no_gradient():
    net = Net()
    net.body[:2].bfloat16()
    parameters = list(net.parameters())

    def backward() -> None:
        sum((p.float() * torch.linspace(-1, 3, p.numel()).view_as(p)).sum() for p in parameters).backward()  # pyright: ignore

    backward()
    expected = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    for parameter in parameters:
        parameter.grad = None
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    before = all_tensors(optimizer)
    norm = release_gradients(optimizer).measured_norm(backward)
    assert torch.equal(norm, expected)
    assert all(parameter.grad is None for parameter in parameters)
    assert_same_bits(before, all_tensors(optimizer))


def test_clipping_by_value_and_the_recorded_norm():
    first = Net()
    nets, norms = (first, copy.deepcopy(first)), []
    for net, releases in zip(nets, (False, True), strict=True):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        release = release_gradients(optimizer) if releases else None
        if release is not None:
            release.clip_value, release.records_norm = 1e-3, True
        net(tokens_of(0)).backward()
        if release is None:
            norms.append(
                torch.nn.utils.get_total_norm([p.grad for p in net.parameters() if p.grad is not None])
            )
            torch.nn.utils.clip_grad_value_(net.parameters(), 1e-3)
        optimizer.step()
        norms += [release.last_norm] if release is not None else []
    assert_same_bits(*[[p.detach() for p in net.parameters()] for net in nets])
    assert torch.equal(*norms)


class Watching(torch.optim.SGD):
    """Counts the gradients of a model that are alive whenever it steps."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__(net.parameters(), lr=0.1)
        self.net, self.alive = net, []

    def step(self, closure: Any = None) -> Any:
        self.alive.append(sum(p.grad is not None for p in self.net.parameters()))
        return super().step(closure)


@pytest.mark.parametrize(("bundle_bytes", "most", "bundles"), [(0, 1, 9), (600, 2, 5)])
def test_no_more_gradients_are_alive_than_the_bundle_holds(bundle_bytes, most, bundles):
    """A bias is 48 bytes, a weight 576, the shared table 960: a bundle of 600 bytes is a bias and a weight."""
    net = Net()
    optimizer = Watching(net)
    release_gradients(optimizer, bundle_bytes=bundle_bytes)
    seen = []
    for parameter in net.parameters():  # these hooks come after the release's
        parameter.register_post_accumulate_grad_hook(
            lambda _: seen.append(sum(p.grad is not None for p in net.parameters()))
        )
    for step in range(3):
        net(tokens_of(step)).backward()
        optimizer.step()
    assert max(optimizer.alive) == most
    assert len(optimizer.alive) == 3 * bundles
    assert len(seen) == 3 * 9
    assert max(seen) < most
    assert not any(p.grad is not None for p in net.parameters())


def peak_bytes(mode: Any, releases: bool) -> tuple[int, int]:
    """The peak of the third step, and the bytes of all gradients."""
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.Tanh()) for _ in range(12)))
    net.to(torch.bfloat16 if mode else torch.float32)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    if mode:
        compensate(optimizer, mode=mode)
    if releases:
        release_gradients(optimizer)
    meter = ByteMeter()
    for step in range(3):
        meter.track([*net.parameters()])
        meter.track(
            [t for state in optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)]
        )
        meter.reset_peak()
        x = torch.full((4, 512), 0.1 * step, dtype=next(net.parameters()).dtype)
        with meter:
            net(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return meter.peak_bytes, sum(p.numel() * p.element_size() for p in net.parameters())


@pytest.mark.parametrize("mode", [None, "kahan"])
def test_the_peak_is_lower_by_the_gradients(mode):
    whole, gradients = peak_bytes(mode, releases=False)
    released, _ = peak_bytes(mode, releases=True)
    # Of 12 layers' gradients one is left, and the temporaries of a step are those of one layer.
    assert whole - released >= 0.75 * gradients


class CountingOptimizer(torch.optim.Optimizer):
    """Keeps its step count in the group, as ScheduleFree does."""

    def __init__(self, groups: Any) -> None:
        super().__init__(groups, {"lr": 0.1, "k": 0})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["k"] += 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data.sub_(group["lr"] * group["k"] * parameter.grad)


def test_group_scalars_and_step_hooks_count_steps_not_parameters():
    net, fired = Net(), []
    optimizer = CountingOptimizer(groups_of(net))
    optimizer.register_step_pre_hook(lambda *_: fired.append("pre"))
    optimizer.register_step_post_hook(lambda *_: fired.append("post"))
    release_gradients(optimizer, bundle_bytes=0)
    for step in range(3):
        net(tokens_of(step)).backward()
        optimizer.step()
    optimizer.step()  # nothing has a gradient
    assert [group["k"] for group in optimizer.param_groups] == [4, 4]
    assert fired == ["pre", "post"] * 4


def test_a_scheduler_may_be_made_before_the_release():
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    release_gradients(optimizer)
    for step in range(2):
        net(tokens_of(step)).backward()
        optimizer.step()
        scheduler.step()
    assert scheduler.get_last_lr() == [0.025]


def test_a_step_takes_a_closure():
    net, calls = Net(), []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    before = all_tensors(optimizer)
    release_gradients(optimizer)

    def closure() -> torch.Tensor:
        loss = net(tokens_of(0))
        loss.backward()
        calls.append(loss.item())
        return loss

    loss = optimizer.step(closure)
    assert loss is not None
    assert calls == [loss.item()]
    assert not torch.equal(before[0], all_tensors(optimizer)[0])


def test_the_live_groups_are_looked_up():
    """A learning rate set by hand, a group added later, a parameter frozen, one unfrozen, one unused."""
    torch.manual_seed(0)
    first, found = Net(), []
    for net, releases in ((copy.deepcopy(first), False), (first, True)):
        layers: Any = list(net.body)
        layers[0].requires_grad_(False)
        unused = nn.Parameter(torch.ones(3))
        optimizer = torch.optim.AdamW([net.table.weight, *layers[0].parameters(), unused], lr=1e-3)
        release = release_gradients(optimizer, bundle_bytes=0) if releases else None
        for step in range(6):
            if step == 1:
                optimizer.param_groups[0]["lr"] = 0.1
            if step == 2:
                optimizer.add_param_group({"params": layers[1].parameters(), "lr": 0.2, "weight_decay": 0.5})
            if step == 3:
                layers[0].requires_grad_(True)
            if step == 4:
                layers[1].requires_grad_(False)
            net(tokens_of(step)).backward()
            if release is not None and step == 3:  # attached at the end of the step before
                assert all(parameter.grad is None for parameter in layers[1].parameters())
            optimizer.step()
            optimizer.zero_grad()
        assert not optimizer.state[unused]
        found.append(all_tensors(optimizer))
    assert_same_bits(*found)


def test_gradients_given_otherwise_are_stepped_at_the_end():
    net = Net()
    twin = copy.deepcopy(net)
    ours, theirs = (torch.optim.AdamW(each.parameters(), lr=0.1) for each in (net, twin))
    release = release_gradients(ours, bundle_bytes=0)
    release.mode = "keep"
    for each, optimizer in ((net, ours), (twin, theirs)):
        each(tokens_of(0)).backward()
        each(tokens_of(1)).backward()
        assert all(parameter.grad is not None for parameter in each.parameters())
        optimizer.step()
    assert_same_bits(list(net.parameters()), list(twin.parameters()))
    assert all(parameter.grad is None for parameter in net.parameters())


def test_options_that_change_after_backward_are_refused():
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    release_gradients(optimizer, bundle_bytes=0)
    net(tokens_of(0)).backward()
    optimizer.param_groups[0]["lr"] = 0.2
    with pytest.raises(RuntimeError, match=r"\(lr: 0.1 became 0.2\); change them before backward"):
        optimizer.step()


def test_gradients_do_not_accumulate_in_a_bundle_either():
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    release = release_gradients(optimizer, bundle_bytes=1 << 20)
    net(tokens_of(0)).backward()
    assert release.parameters_stepped == 0
    with pytest.raises(RuntimeError, match="second gradient in one step"):
        net(tokens_of(1)).backward()


def test_flush_steps_what_a_bundle_holds():
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    release = release_gradients(optimizer, bundle_bytes=1 << 20)
    net(tokens_of(0)).backward()
    release.flush()
    assert release.parameters_stepped == 9
    assert all(parameter.grad is None for parameter in net.parameters())


def test_a_second_backward_is_refused_until_a_checkpoint_is_loaded():
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    release = release_gradients(optimizer, bundle_bytes=0)
    saved = copy.deepcopy(optimizer.state_dict())
    net(tokens_of(0)).backward()
    assert release.parameters_stepped == 9
    with pytest.raises(RuntimeError, match=r"second gradient in one step.*load a checkpoint"):
        net(tokens_of(1)).backward()
    optimizer.zero_grad()
    optimizer.load_state_dict(saved)
    assert release.parameters_stepped == 0
    net(tokens_of(1)).backward()
    optimizer.step()


def test_a_weight_that_autograd_still_needs_is_an_error_not_a_wrong_gradient():
    """The last layer's weight is stepped before a detached use of it, earlier in the model, is differentiated."""
    first, last = nn.Linear(4, 4), nn.Linear(4, 4)
    optimizer = CountingOptimizer([*first.parameters(), *last.parameters()])  # it writes through .data
    release_gradients(optimizer, bundle_bytes=0)
    hidden = first(torch.ones(2, 4)) @ last.weight.detach()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        last(hidden).sum().backward()


def test_recomputed_activations_see_the_weights_of_the_forward():
    torch.manual_seed(0)
    first, found = nn.ModuleList([nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8)]), []
    for net, releases in ((copy.deepcopy(first), False), (first, True)):
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
        release = release_gradients(optimizer, bundle_bytes=0) if releases else None

        def shared(x: torch.Tensor, net: Any = net) -> torch.Tensor:
            return net[0](net[1](net[0](x).tanh())) + net[2](x)

        for step in range(3):
            torch.manual_seed(step)
            x: Any = torch.ones(4, 8)
            for _ in range(3):
                x = checkpoint(shared, x, use_reentrant=False)
            loss = x.square().mean()
            if release is not None:
                norm = release.measured_norm(lambda loss=loss: loss.backward(retain_graph=True))
                release.clip_next_step(0.1, norm)
            loss.backward()
            if release is None:
                torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        found.append(all_tensors(optimizer))
    assert_same_bits(*found)


@pytest.mark.parametrize("mode", [None, "kahan", "stochastic"])
@pytest.mark.parametrize("releases", [(True, False), (False, True)])
def test_a_run_may_be_resumed_with_release_or_without(mode, releases):
    def built(release: bool, seed: int) -> tuple[Net, Optimizer]:
        torch.manual_seed(seed)
        net = Net().to(torch.bfloat16 if mode else torch.float32)
        optimizer = torch.optim.AdamW(groups_of(net), lr=1e-2)
        if mode:
            compensate(optimizer, mode=mode)
        if release:
            release_gradients(optimizer)
        return net, optimizer

    whole, whole_optimizer = built(False, 0)
    train(whole, whole_optimizer, steps=range(3))
    train(whole, whole_optimizer, steps=range(3, 6))
    half, half_optimizer = built(releases[0], 0)
    train(half, half_optimizer, steps=range(3))
    rest, rest_optimizer = built(releases[1], 1)
    rest.load_state_dict(half.state_dict())
    rest_optimizer.load_state_dict(half_optimizer.state_dict())
    train(rest, rest_optimizer, steps=range(3, 6))
    assert_same_bits(all_tensors(whole_optimizer), all_tensors(rest_optimizer))


@pytest.mark.parametrize("compensated", [False, True])
@pytest.mark.parametrize("scheduler_first", [False, True])
def test_undo_gives_the_step_back(compensated, scheduler_first):
    net = Net().bfloat16()
    twin = copy.deepcopy(net)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.1) for each in (net, twin)]
    if compensated:
        for optimizer in optimizers:
            compensate(optimizer)
    schedulers = [torch.optim.lr_scheduler.ConstantLR(each) for each in optimizers if scheduler_first]
    hooks = [len(each._optimizer_load_state_dict_pre_hooks) for each in optimizers]
    release = release_gradients(optimizers[0], bundle_bytes=0)
    release.clip_value = 1e-6
    schedulers += [torch.optim.lr_scheduler.ConstantLR(each) for each in optimizers if not scheduler_first]
    assert release_of(optimizers[0]) is release
    release.undo()
    release.undo()
    assert release_of(optimizers[0]) is None
    assert [len(each._optimizer_load_state_dict_pre_hooks) for each in optimizers] == hooks
    for each, optimizer in zip((net, twin), optimizers, strict=True):
        for step in range(2):
            each(tokens_of(step)).backward()
            assert all(parameter.grad is not None for parameter in each.parameters())
            optimizer.step()
            optimizer.zero_grad()
    for scheduler in schedulers:
        scheduler.step()
    assert_same_bits(all_tensors(optimizers[0]), all_tensors(optimizers[1]))


def test_nothing_keeps_the_weights_once_the_optimizer_is_gone():
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    release_gradients(optimizer)
    net(tokens_of(0)).backward()
    optimizer.step()
    watched = weakref.ref(net.head.weight)
    gc.disable()
    try:
        del optimizer
        net(tokens_of(0)).backward()
        assert net.head.weight.grad is not None  # without an optimizer gradients are gradients
        del net
        assert watched() is None
    finally:
        gc.enable()


def test_gradients_that_cannot_be_released_are_refused():
    table = nn.Embedding(10, 4, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
    release_gradients(optimizer)
    with pytest.raises(RuntimeError, match="is sparse.*sparse=False"):
        table(torch.tensor([1])).sum().backward()
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    release_gradients(optimizer)
    with (
        pytest.warns(UserWarning, match="create_graph=True"),
        pytest.raises(RuntimeError, match="create_graph=True.*torch.autograd.grad"),
    ):
        net(tokens_of(0)).backward(create_graph=True)


def test_gradients_that_the_clipping_norm_does_not_count_are_refused():
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    release_gradients(optimizer).clip_next_step(1.0, torch.tensor(2.0))
    net.head.weight.grad = torch.ones_like(net.head.weight)
    with pytest.raises(RuntimeError, match="1 parameters got their gradients outside"):
        optimizer.step()


def of_group(**options: Any) -> Optimizer:
    optimizer = torch.optim.SGD(Net().parameters(), lr=0.1)
    optimizer.param_groups[0].update(options)
    return optimizer


@pytest.mark.parametrize(
    ("optimizer", "error", "message"),
    [
        (lambda: torch.optim.LBFGS(Net().parameters()), TypeError, "LBFGS.step demands a closure.*AdamW"),
        (lambda: of_group(differentiable=True), ValueError, "differentiable=True"),
        (lambda: of_group(max_grad_norm=1.0), ValueError, "max_grad_norm=1.0.*gradient_clip_val"),
        (lambda: of_group(d=1e-6, growth_rate=2.0), ValueError, "estimates one step size"),
    ],
)
def test_optimizers_that_need_all_gradients_are_refused(optimizer, error, message):
    with pytest.raises(error, match=message):
        release_gradients(optimizer())


def test_wrong_use_is_refused():
    optimizer = torch.optim.AdamW(Net().bfloat16().parameters())
    with pytest.raises(ValueError, match="bundle_bytes=-1 must be 0 or more"):
        release_gradients(optimizer, bundle_bytes=-1)
    release_gradients(optimizer)
    with pytest.raises(ValueError, match="released already"):
        release_gradients(optimizer)


def test_compensating_after_the_release_is_refused():
    net = Net().bfloat16()
    optimizer = torch.optim.AdamW(net.parameters())
    release_gradients(optimizer, bundle_bytes=0)
    compensate(optimizer)
    with pytest.raises(RuntimeError, match=r"compensate\(optimizer\) first"):
        net(tokens_of(0)).backward()


@pytest.mark.parametrize("change", [lambda p: p.mul_(0.9), lambda p: p.copy_(torch.zeros_like(p))])
def test_weights_that_change_between_backward_and_step_are_refused(change):
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    release_gradients(optimizer, bundle_bytes=0)
    net(tokens_of(0)).backward()
    with torch.no_grad():
        change(net.body[2].weight)
    with pytest.raises(RuntimeError, match=r"shape \(12, 12\) was changed between backward and step"):
        optimizer.step()


def test_a_gradient_that_is_set_after_its_parameter_was_stepped_is_refused():
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    release_gradients(optimizer, bundle_bytes=0)
    net(tokens_of(0)).backward()
    net.body[2].weight.grad = torch.ones(12, 12)
    with pytest.raises(RuntimeError, match=r"shape \(12, 12\) gets a second gradient in one step"):
        optimizer.step()


def test_weights_may_change_while_their_gradients_wait():
    torch.manual_seed(0)
    first, found = Net(), []
    for net, releases in ((copy.deepcopy(first), False), (first, True)):
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
        if releases:
            release_gradients(optimizer, bundle_bytes=1 << 20)
        net(tokens_of(0)).backward()
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.mul_(0.9)
        optimizer.step()
        found.append(all_tensors(optimizer))
    assert_same_bits(*found)


def test_the_undo_of_an_optimizer_that_is_gone():
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    release = release_gradients(optimizer, bundle_bytes=0)
    net(tokens_of(0)).backward()
    del optimizer
    gc.collect()
    release.undo()
    assert not any(p._post_accumulate_grad_hooks for p in net.parameters())  # pyright: ignore
    net(tokens_of(1)).backward()
    assert all(parameter.grad is not None for parameter in net.parameters())
