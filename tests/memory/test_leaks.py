# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportOptionalMemberAccess=false
"""Tensors that every step leaves behind, and all that only looks like it."""

import copy
import gc
import inspect
from collections import deque

import pytest
import torch
from torch import nn
from torchmetrics import MetricCollection
from torchmetrics.classification import BinaryAccuracy, BinaryAUROC

from lightning_memkit.memory.leaks import LeakWatch

WIDTH, ROWS = 32, 64


@pytest.fixture(autouse=True, scope="module")
def frozen() -> None:
    """Undo it: `gc.get_referrers`, which finds who holds a tensor, passes over what is frozen, this module's too."""
    gc.unfreeze()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.kept = None

    def forward(self, x):
        return self.linear(x).tanh()


def line_of(function, text):
    lines, start = inspect.getsourcelines(function)
    (index,) = [i for i, line in enumerate(lines) if text in line]
    return f"test_leaks.py:{start + index}"


def watched(step, model=None, steps=5, expected=()):
    """The findings after some steps of a training loop whose body is `step(model, x)`, which gives the loss."""
    model = model or Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    watch = LeakWatch()
    for index in range(steps):
        with watch.step():
            x = torch.randn(ROWS, WIDTH)
            loss = step(model, x)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            del loss, x
        if index == steps - 1:
            states = [t for state in optimizer.state.values() for t in state.values()]
            return watch.findings(model, [*states, *expected])
    return []


def losses_in_a_list(model, x):
    model.kept = [] if model.kept is None else model.kept
    loss = model(x).square().mean()
    model.kept.append(loss)
    return loss


def logits_in_a_dict(model, x):
    model.kept = {} if model.kept is None else model.kept
    logits = model(x)
    model.kept[len(model.kept)] = {"logits": logits.detach()}
    return logits.square().mean()


def a_view_in_a_deque(model, x):
    model.kept = deque() if model.kept is None else model.kept
    hidden = model(x)
    model.kept.append((hidden.detach()[0],))
    return hidden.square().mean()


def in_a_closure(model, x, kept=[]):  # noqa: B006
    logits = model(x)
    kept.append(logits.detach())
    return logits.square().mean()


@pytest.mark.parametrize(
    ("step", "line", "size", "graph", "holder"),
    [
        (losses_in_a_list, "loss = model(x)", 5 * 4, True, "held by Model.kept, a list of 5"),
        (logits_in_a_dict, "logits = model(x)", None, False, "held by Model.kept, a dict of 5"),
        (a_view_in_a_deque, "hidden = model(x)", None, False, "held by Model.kept, a deque of 5"),
        (in_a_closure, "logits = model(x)", None, False, "held by a list of 5"),
    ],
)
def test_what_every_step_leaves_is_named_with_its_line(step, line, size, graph, holder):
    (found,) = watched(step)
    assert found.kind == "kept_tensors"
    assert found.size_bytes == (size or 5 * ROWS * WIDTH * 4)
    # Logits are made within the model's forward, the loss in the step itself.
    made_in = line_of(step, line) if graph else line_of(Model, "self.linear(x).tanh()")
    assert f"{made_in}, " in found.where
    assert holder in found.where
    assert ("with their graph" in found.what) == graph
    assert ("detach" in found.remedy) == graph


def test_what_a_kept_graph_keeps_counts_with_the_tensor_that_is_held():
    def auxiliary(model, x):
        model.kept = [] if model.kept is None else model.kept
        model.kept.append(model(x).exp().mean())  # no backward ever frees what it saved
        return model(x).square().mean()

    (found,) = watched(auxiliary)
    assert "with their graph" in found.what
    assert found.where.startswith(f"made at tests/memory/{line_of(auxiliary, 'model.kept.append')}")
    # tanh's and exp's results, and the input that the linear layer saved, of each step.
    assert found.size_bytes == pytest.approx(5 * 3 * ROWS * WIDTH * 4, rel=0.01)


def a_growing_sum(model, x):
    hidden = model(x).exp()  # no backward ever frees what it saved
    model.kept = hidden.mean() if model.kept is None else model.kept + hidden.mean()
    return model(x).square().mean()


def a_growing_sum_that_is_cut(model, x):
    hidden = model(x).exp()
    model.kept = hidden.mean().detach() if model.kept is None else model.kept + hidden.mean().detach()
    return model(x).square().mean()


def a_growing_sum_of_freed_graphs(model, x):
    loss = model(x).square().mean()
    model.kept = loss if model.kept is None else model.kept + loss
    return loss


def test_a_sum_that_keeps_every_steps_graph_is_named():
    (found,) = watched(a_growing_sum)
    assert f"{line_of(a_growing_sum, 'model.kept + hidden')}, held by Model.kept" in found.where
    assert found.size_bytes == pytest.approx(5 * 3 * ROWS * WIDTH * 4, rel=0.01)
    assert "detach" in found.remedy


@pytest.mark.parametrize("step", [a_growing_sum_that_is_cut, a_growing_sum_of_freed_graphs])
def test_a_sum_that_keeps_no_tensors_is_left_alone(step):
    assert watched(step) == []


def test_gradients_that_are_collected_are_named():
    def collecting(model, x):
        model.kept = [] if model.kept is None else model.kept
        if model.linear.weight.grad is not None:
            model.kept.append(model.linear.weight.grad.clone())
        return model(x).square().mean()

    # The first step has no gradient to collect, so that five steps show three.
    assert watched(collecting) == []
    model = Model()
    model.linear.weight.grad = torch.zeros(WIDTH, WIDTH)
    (found,) = watched(collecting, model)
    assert line_of(collecting, "model.kept.append") in found.where


def ema(model, x):
    if model.kept is None:
        model.kept = {name: p.detach().clone() for name, p in model.named_parameters()}
    loss = model(x).square().mean()
    model.kept = {n: 0.9 * model.kept[n] + 0.1 * p.detach() for n, p in model.named_parameters()}
    return loss


def averaged_model(model, x):
    if model.kept is None:
        model.kept = [
            torch.optim.swa_utils.AveragedModel(copy.deepcopy(model))
        ]  # a list: no child of the model
    model.kept[0].update_parameters(model)
    return model(x).square().mean()


def cached_mask(model, x):
    model.kept = {} if model.kept is None else model.kept
    if len(x) not in model.kept:
        model.kept[len(x)] = torch.ones(len(x), len(x)).tril()
    return (model.kept[len(x)] @ model(x)).square().mean()


def prefetched(model, x):
    model.kept = deque() if model.kept is None else model.kept
    while len(model.kept) < 4:
        model.kept.append(torch.randn(ROWS, WIDTH))
    return model(model.kept.popleft()).square().mean()


def last_outputs(model, x):
    model.kept = model(x)
    return model.kept.square().mean()


def numbers(model, x):
    model.kept = [] if model.kept is None else model.kept
    loss = model(x).square().mean()
    model.kept.append(loss.item())
    return loss


def small_detached(model, x):
    model.kept = [] if model.kept is None else model.kept
    loss = model(x).square().mean()
    model.kept.append(loss.detach())  # 4 bytes a step
    return loss


@pytest.mark.parametrize(
    "step", [ema, averaged_model, cached_mask, prefetched, last_outputs, numbers, small_detached]
)
def test_what_is_replaced_cached_or_prefetched_is_no_leak(step):
    assert watched(step, steps=6) == []


def test_data_that_was_there_before_is_no_leak():
    rows = [torch.randn(ROWS * WIDTH) for _ in range(5)]
    given = iter(rows)
    assert watched(lambda model, x: model(next(given).view(ROWS, WIDTH)).square().mean()) == []


def test_metrics_states_are_no_leak_even_where_they_are_lists():
    class Measured(Model):
        def __init__(self):
            super().__init__()
            self.metrics = MetricCollection([BinaryAUROC(), BinaryAccuracy()])

    def step(model, x):
        out = model(x)
        model.metrics.update(out.detach().sigmoid().flatten(), (x > 0).int().flatten())
        return out.square().mean()

    model = Measured()
    assert watched(step, model) == []
    assert len(model.metrics["BinaryAUROC"].preds) == 5  # they do grow


def test_expected_tensors_are_no_leak():
    def step(model, x):
        kept.append(model(x).detach())
        return model(x).square().mean()

    kept = []
    assert len(watched(step)) == 1
    kept.clear()

    class Later:
        def __iter__(self):
            return iter(kept)

    assert watched(step, expected=Later()) == []


def test_fewer_steps_find_nothing_and_notes_are_let_go():
    assert watched(losses_in_a_list, steps=3) == []
    watch = LeakWatch()
    with watch.step():
        kept = torch.ones(10) * 2
    watch.forget()
    assert watch.findings() == []
    assert torch._C._len_torch_dispatch_stack() == 0
    del kept


def test_a_step_is_the_same_watched_or_not():
    def run(steps, watch):
        torch.manual_seed(0)
        model = Model()
        for _ in range(steps):
            if watch is not None:
                with watch.step():
                    model(torch.ones(2, WIDTH)).square().mean().backward()
            else:
                model(torch.ones(2, WIDTH)).square().mean().backward()
        return model.linear.weight.grad

    assert torch.equal(run(3, LeakWatch()), run(3, None))


def test_compiled_modules_run_compiled_while_watched_and_afterwards():
    runs = []

    def backend(graph, _):
        return lambda *inputs: runs.append(1) or graph(*inputs)

    model, watch = Model(), LeakWatch()
    compiled, kept = torch.compile(model, backend=backend), []
    for _ in range(5):
        with watch.step():
            loss = compiled(torch.ones(2, WIDTH)).square().mean()
            loss.backward()
            kept.append(loss)
    compiled(torch.ones(2, WIDTH))
    assert len(runs) == 6
    (found,) = watch.findings()
    assert "with their graph" in found.what
    torch._dynamo.reset()
