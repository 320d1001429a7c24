"""State in objects of any class, in iterators and functions: a rollback sees it change and puts it back."""

import argparse
import collections
import contextvars
import enum
import functools
import io
import itertools
import logging
import multiprocessing
import queue
import threading
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pydantic
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_memkit.micro_batching.changes.rollback import Rollback

Count = Callable[[], Any]


class Replay(Dataset):
    n = 0


class Settings(pydantic.BaseModel):
    n: int = 0


class Phase(enum.Enum):
    WARM = 1


class Stats:
    n = 0


class Holder:
    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


class Scripted(nn.Module):
    n: int

    def __init__(self) -> None:
        super().__init__()
        self.n = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.n += 1
        return x


class Cached(nn.Module):
    @staticmethod
    @functools.lru_cache(maxsize=None)  # noqa: UP033 - as users write it
    def noise(n: int) -> torch.Tensor:
        return torch.randn(n)


def _counting(owner: Any) -> Count:
    def count() -> int:
        owner.n += 1
        return owner.n

    return count


def _with_number(owner: Any) -> tuple[Any, Count]:
    owner.n = 0
    return owner, _counting(owner)


def _queue() -> tuple[Any, Count]:
    waiting: queue.Queue[int] = queue.Queue()
    for i in range(1, 99):
        waiting.put(i)
    return waiting, waiting.get


def _shared() -> tuple[Any, Count]:
    value: Any = multiprocessing.Value("i", 0)

    def count() -> int:
        value.value += 1
        return value.value

    return value, count


def _weak() -> tuple[Any, Count]:
    key = nn.Linear(1, 1)
    counts: Any = weakref.WeakKeyDictionary({key: 0})

    def count() -> int:
        counts[key] += 1
        return counts[key]

    return [counts, key], count


def _user_dict() -> tuple[Any, Count]:
    counts: Any = collections.UserDict(n=0)

    def count() -> int:
        counts["n"] += 1
        return counts["n"]

    return counts, count


def _function() -> tuple[Any, Count]:
    def count() -> int:
        count.n = getattr(count, "n", 0) + 1
        return count.n

    return count, count


def _class() -> tuple[Any, Count]:
    Stats.n = 0
    return Stats, _counting(Stats)


def _scheduler() -> tuple[Any, Count]:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step + 1)

    def count() -> int:
        optimizer.step()
        schedule.step()
        return schedule.last_epoch

    return schedule, count


def _optimizer() -> tuple[Any, Count]:
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.Adam([weight])

    def count() -> int:
        weight.grad = torch.ones(3)
        optimizer.step()
        return int(optimizer.state[weight]["step"])

    return optimizer, count


def _sobol() -> tuple[Any, Count]:
    engine = torch.quasirandom.SobolEngine(2)
    return engine, lambda: engine.draw(1).shape[0] and engine.num_generated


def _file() -> tuple[Any, Count]:
    file = io.StringIO("\n".join(map(str, range(1, 99))))
    return file, lambda: int(file.readline())


def _script() -> tuple[Any, Count]:
    scripted = torch.jit.script(Scripted())

    def count() -> int:
        scripted(torch.zeros(1))
        return scripted.n

    return scripted, count


def _variable() -> tuple[Any, Count]:
    variable = contextvars.ContextVar("n", default=0)
    variable.set(0)

    def count() -> int:
        variable.set(variable.get() + 1)
        return variable.get()

    return variable, count


def _tensor() -> tuple[Any, Count]:
    marked = torch.zeros(2)
    marked.n = 0  # pyright: ignore[reportAttributeAccessIssue]
    return [marked], _counting(marked)


def _bare_tensor() -> tuple[Any, Count]:
    bare: Any = torch.zeros(2)

    def count() -> int:
        bare.n = getattr(bare, "n", 0) + 1
        return bare.n

    return [bare], count


def _proxy() -> tuple[Any, Count]:
    counts: Any = types.MappingProxyType({"n": [0]})

    def count() -> int:
        counts["n"][0] += 1
        return counts["n"][0]

    return counts, count


def _view() -> tuple[Any, Count]:
    view = memoryview(bytearray(2))

    def count() -> int:
        view[0] += 1
        return view[0]

    return view, count


def _seeds() -> tuple[Any, Count]:
    seeds = np.random.SeedSequence(3)
    return seeds, lambda: seeds.spawn(1)[0].spawn_key[0] + 1


def _spawning() -> tuple[Any, Count]:
    generator = np.random.default_rng(3)
    seeds: Any = generator.bit_generator.seed_seq

    def count() -> int:
        generator.spawn(1)
        return seeds.n_children_spawned

    return generator, count


class Described:
    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def __get__(self, owner: Any, kind: Any = None) -> int:
        return self.counts.get("n", 0)

    def __set__(self, owner: Any, value: int) -> None:
        self.counts["n"] = value


class CallsCount:
    n = 0

    def __call__(self) -> int:
        self.n += 1
        return self.n


def _descriptor() -> tuple[Any, Count]:
    class WithDescriptor:
        n = Described()

    owner = WithDescriptor()
    return owner, _counting(owner)


def _called() -> tuple[Any, Count]:
    class WithCallable:
        count = CallsCount()

    owner = WithCallable()
    return owner, owner.count


OBJECTS: dict[str, Callable[[], tuple[Any, Count]]] = {
    "a namespace": lambda: _with_number(argparse.Namespace()),
    "an own data set": lambda: _with_number(Replay()),
    "a loader's data set": lambda: (
        lambda data: (DataLoader(data), _counting(data))  # pyright: ignore[reportArgumentType]
    )(Replay()),
    "a model of pydantic": lambda: (lambda s: (s, _counting(s)))(Settings()),
    "an enum's member": lambda: _with_number(Phase.WARM),
    "thread-local data": lambda: _with_number(threading.local()),
    "a tensor's attribute": _tensor,
    "a tensor's first attribute": _bare_tensor,
    "a proxy of a dictionary": _proxy,
    "a view of bytes": _view,
    "a sequence of seeds": _seeds,
    "a generator that spawns": _spawning,
    "a descriptor's dictionary": _descriptor,
    "a callable of a class": _called,
    "a queue": _queue,
    "shared memory": _shared,
    "a weak dictionary": _weak,
    "a UserDict": _user_dict,
    "a function's attribute": _function,
    "a class": _class,
    "a scheduler": _scheduler,
    "an optimizer": _optimizer,
    "a Sobol engine": _sobol,
    "a file in memory": _file,
    "a module of TorchScript": _script,
    "a context variable": _variable,
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize("kind", OBJECTS)
def test_objects_of_other_classes_are_put_back(kind: str) -> None:
    module: Any = nn.Module()
    module.held, count = OBJECTS[kind]()
    rollback = Rollback(module)
    assert [count(), count()] == [1, 2]
    assert rollback.changes()
    for _ in range(2):  # a snapshot may be restored any number of times
        rollback.restore()
        assert count() == 1
    rollback.restore()
    assert not rollback.changes()


def test_a_class_attribute_that_a_step_adds_is_removed() -> None:
    class Counting(nn.Module):
        pass

    rollback = Rollback(Counting())
    Counting.n = 1  # pyright: ignore[reportAttributeAccessIssue]
    assert [change.name for change in rollback.changes()] == ["Counting.n"]
    rollback.restore()
    assert not hasattr(Counting, "n")


@pytest.mark.parametrize("mode", ["r", "w+"])
def test_files_go_back(tmp_path: Path, mode: str) -> None:
    path = tmp_path / "lines.txt"
    path.write_text("a\nb\n")
    module: Any = nn.Module()
    with path.open(mode) as file:
        module.file = file
        before = file.readline() if mode == "r" else file.write("one\n")
        rollback = Rollback(module)
        after = file.readline() if mode == "r" else file.write("two\n")
        assert rollback.changes()
        rollback.restore()
        assert (file.readline() if mode == "r" else file.write("two\n")) == after
        assert before
    assert path.read_text() == ("a\nb\n" if mode == "r" else "one\ntwo\n")


def _in_closure(it: Iterator[int]) -> Count:
    return lambda: next(it)


HELD: dict[str, Callable[[Iterator[int]], tuple[Any, Callable[[Any], Any]]]] = {
    "attribute": lambda it: (it, next),
    "object": lambda it: (Holder(it=it), lambda held: next(held.it)),
    "list": lambda it: ([it], lambda held: next(held[0])),
    "tuple": lambda it: ((it, 1), lambda held: next(held[0])),
    "dict": lambda it: ({"it": it}, lambda held: next(held["it"])),
    "deque": lambda it: (collections.deque([it]), lambda held: next(held[0])),
    "bound method": lambda it: (it.__next__, lambda held: held()),
    "partial": lambda it: (functools.partial(next, it), lambda held: held()),
    "closure": lambda it: (_in_closure(it), lambda held: held()),
    "two places": lambda it: ([it, {"again": it}], lambda held: next(held[1]["again"])),
}
SOURCES: dict[str, Callable[[], Iterator[int]]] = {
    "count": itertools.count,
    "generator": lambda: (i for i in range(99)),
    "list": lambda: iter(list(range(99))),
    "zip": lambda: map(lambda pair: pair[0], zip(range(99), range(99), strict=True)),
}


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("held", HELD)
def test_iterators_go_back_wherever_they_are(held: str, source: str) -> None:
    module: Any = nn.Module()
    module.held, draw = HELD[held](SOURCES[source]())
    rollback = Rollback(module)
    assert [draw(module.held), draw(module.held)] == [0, 1]
    assert rollback.changes()
    rollback.restore()
    later = Rollback(module)
    assert [draw(module.held), draw(module.held), draw(module.held)] == [0, 1, 2]
    later.restore()
    assert draw(module.held) == 0


def test_generators_that_are_sent_values_go_back() -> None:
    def controller() -> Any:
        total = 0
        while True:
            total += yield total

    module: Any = nn.Module()
    module.controller = controller()
    next(module.controller)
    rollback = Rollback(module)
    assert [module.controller.send(2), module.controller.send(3)] == [2, 5]
    rollback.restore()
    assert module.controller.send(2) == 2
    with pytest.warns(UserWarning, match="sent another value than in a trial"):
        module.controller.send(10)


def test_items_that_draw_random_numbers_draw_them_again() -> None:
    module: Any = nn.Module()
    module.noise = (torch.randn(3) for _ in range(9))
    rollback = Rollback(module)
    first, then = next(module.noise), torch.rand(3)
    rollback.restore()
    again = Rollback(module)
    assert torch.equal(next(module.noise), first)
    assert torch.equal(torch.rand(3), then)
    again.restore()
    torch.rand(1)
    with pytest.warns(UserWarning, match="draws from the global random generators"):
        next(module.noise)


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("place", ["attribute", "class"])
def test_caches_forget_what_a_trial_has_drawn(place: str, warm: bool) -> None:
    module = Cached()
    Cached.noise.cache_clear()
    if place == "attribute":
        module.noise = functools.lru_cache(None)(lambda n: torch.randn(n))  # pyright: ignore
    kept = module.noise(2) if warm else None
    rollback = Rollback(module)
    noise, then = module.noise(3), torch.rand(1)
    rollback.restore()
    assert torch.equal(module.noise(3), noise)
    assert torch.equal(torch.rand(1), then)
    assert kept is None or module.noise(2) is kept


def test_a_limited_cache_that_held_results_is_named() -> None:
    module: Any = nn.Module()
    module.noise = functools.lru_cache(8)(lambda n: torch.randn(n))
    module.noise(2)
    rollback = Rollback(module)
    module.noise(3)
    with pytest.warns(UserWarning, match=r"can't put back noise"):
        rollback.restore()


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_tensors_first_hook_is_removed(kind: str) -> None:
    module, calls = nn.Linear(2, 2), []
    rollback = Rollback(module)
    getattr(module.weight, kind)(lambda *_: calls.append(1))
    rollback.restore()
    getattr(module.weight, kind)(lambda *_: calls.append(1))
    module(torch.ones(1, 2)).sum().backward()
    assert calls == [1]


def test_requires_grad_is_put_back_and_named() -> None:
    module = nn.Linear(2, 2)
    rollback = Rollback(module)
    module.weight.requires_grad_(False)
    assert [change.name for change in rollback.changes()] == ["weight.requires_grad"]
    rollback.restore()
    assert module.weight.requires_grad
    assert not rollback.changes()


def test_locks_threads_and_loggers_are_left_alone() -> None:
    module: Any = nn.Module()
    module.log, module.lock, module.thread = logging.getLogger("one"), threading.Lock(), threading.Thread()
    module.log.setLevel(10)
    rollback = Rollback(module)
    module.log.setLevel(20)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rollback.restore()
    assert module.log.level == 20


def test_the_first_buffer_parameter_and_child_of_a_module_are_removed() -> None:
    module: Any = nn.Module()
    rollback = Rollback(module)
    module.register_buffer("mean", torch.ones(2))
    module.weight = nn.Parameter(torch.ones(2))
    module.child = nn.Linear(1, 1)
    rollback.restore()
    assert not [*module._buffers, *module._parameters, *module._modules]
