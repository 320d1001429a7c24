"""Collections that look only at what a piece of work has made."""

import gc
import os
import weakref
from collections.abc import Iterator

import pytest

from lightning_memkit.memory.out_of_memory import free_memory
from lightning_memkit.utilities.forks import leave_inherited
from lightning_memkit.utilities.garbage import collect_all, new_garbage, put_aside, without_collecting


class Node:
    """In a cycle with itself."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def nothing_frozen() -> Iterator[None]:
    """As a user's process begins, and without collections that a threshold starts."""
    gc.unfreeze()
    gc.collect()
    gc.disable()
    yield
    gc.enable()
    gc.freeze()


def cycle() -> "weakref.ref[Node]":
    return weakref.ref(Node())


def test_what_was_made_is_collected_and_what_was_there_is_not_looked_at() -> None:
    before = cycle()
    with new_garbage():
        put_aside()
        assert gc.get_freeze_count()
        made = cycle()
        assert made() is not None
    assert made() is None
    assert before() is not None
    assert gc.get_freeze_count() == 0
    gc.collect()
    assert before() is None


def test_nothing_is_collected_where_nothing_was_put_aside() -> None:
    with new_garbage():
        made = cycle()
    assert made() is not None
    assert gc.get_freeze_count() == 0


def test_outside_nothing_is_put_aside() -> None:
    put_aside()
    assert gc.get_freeze_count() == 0


@pytest.mark.parametrize("collect", [collect_all, free_memory])
def test_running_out_of_memory_collects_all(collect) -> None:
    """A model of before, in a cycle, holds memory that the step needs."""
    before = cycle()
    with new_garbage():
        put_aside()
        collect()
        assert before() is None
        made = cycle()
    assert made() is None
    assert gc.get_freeze_count() == 0


def test_what_somebody_else_has_frozen_stays_frozen() -> None:
    gc.freeze()
    frozen = gc.get_freeze_count()
    with new_garbage():
        put_aside()
        made = cycle()
    assert made() is None
    assert gc.get_freeze_count() >= frozen - 100


def test_an_error_takes_back_what_was_put_aside() -> None:
    def fails() -> None:
        with new_garbage():
            put_aside()
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert gc.get_freeze_count() == 0


def test_the_outermost_collects() -> None:
    with new_garbage():
        with new_garbage():
            put_aside()
            made = cycle()
        assert made() is not None
        assert gc.get_freeze_count()
    assert made() is None
    assert gc.get_freeze_count() == 0


def test_a_fork_leaves_what_it_inherits() -> None:
    """Destructors of inherited objects may wait for threads that a fork does not have."""
    with new_garbage():
        put_aside()
        inherited = cycle()
        child = os.fork()
        if not child:
            leave_inherited(collects=False)
            collect_all()
            os._exit(int(inherited() is None))
        assert os.waitpid(child, 0)[1] == 0
    assert inherited() is None


@pytest.mark.parametrize("collects", [True, False])
def test_the_collector_is_off_meanwhile_and_then_as_before(collects):
    was = gc.isenabled()
    (gc.enable if collects else gc.disable)()
    try:
        with without_collecting():
            assert not gc.isenabled()
        assert gc.isenabled() is collects
        with pytest.raises(ImportError), without_collecting():
            raise ImportError
        assert gc.isenabled() is collects
    finally:
        (gc.enable if was else gc.disable)()
