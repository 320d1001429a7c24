"""Copies one batch ahead, on an accelerator without hardware: a wait that is missing shows as wrong values there."""

from collections import namedtuple

import pytest
import torch

from lightning_memkit.data.batching.batch import PackedBatch
from lightning_memkit.data.loading.copy_ahead import copied_ahead, copies_help
from tests.testing.fake_device import fake_device
from tests.testing.needs import NEEDS_COMPILER

pytestmark = NEEDS_COMPILER
Pair = namedtuple("Pair", "x y")


class Graph:
    """An object that moves itself, and knows nothing of `non_blocking`."""

    def __init__(self, nodes):
        self.nodes = nodes

    def to(self, device):
        return Graph(self.nodes.to(device))


@pytest.fixture
def device():
    with fake_device() as device:
        device.reset_counts()
        yield device


def batches(count=4):
    for number in range(count):
        yield torch.full((8,), float(number)).pin_memory()


def test_batches_arrive_whole_and_in_order(device):
    arrived = [batch.cpu().tolist() for batch in copied_ahead(device.torch_device)(batches())]
    assert arrived == [[float(number)] * 8 for number in range(4)]
    assert device.hazards == 0
    assert device.transfers.to_device_copies == 4


def test_the_next_copy_is_under_way_while_a_batch_is_in_use_and_no_more(device):
    drawn = []

    def host():
        for batch in batches():
            drawn.append(len(drawn))
            yield batch

    before = device.live_bytes
    for number, batch in enumerate(copied_ahead(device.torch_device)(host())):
        assert batch.device == device.torch_device
        assert len(drawn) == min(4, number + 2)
        assert device.live_bytes - before <= 3 * 8 * 4  # the loop's last one goes when it has the next


def test_what_was_not_waited_for_is_not_there_yet(device):
    """The fake device copies as late as it may: that the values above are right is not for free."""
    side = torch.Stream(device.torch_device)
    target = torch.zeros(8, device=device.torch_device)
    source = torch.ones(8).pin_memory()
    with side:
        target.copy_(source, non_blocking=True)
    assert target.cpu().sum() == 0
    side.synchronize()
    assert target.cpu().sum() == 8


def test_containers_and_objects_are_copied_with_their_kind(device):
    host = {"pair": Pair(torch.ones(2), [torch.ones(3), "name"]), "graph": Graph(torch.ones(4)), "count": 5}
    packed = PackedBatch(input_ids=torch.ones(1, 2), max_seqlen=2)
    first, second = copied_ahead(device.torch_device)(iter([host, packed]))
    assert (
        first["pair"].x.device
        == first["pair"].y[0].device
        == first["graph"].nodes.device
        == device.torch_device
    )
    assert (first["pair"].y[1], first["count"], type(first["pair"])) == ("name", 5, Pair)
    assert type(second) is PackedBatch
    assert second["input_ids"].device == device.torch_device
    assert second["max_seqlen"] == 2


def test_an_error_of_the_loader_comes_through_after_what_came_before_it(device):
    def fails():
        yield torch.ones(2)
        yield torch.ones(2)
        raise KeyError("no more")

    ahead = copied_ahead(device.torch_device)(fails())
    assert next(ahead).sum() == 2
    with pytest.raises(KeyError, match="no more"):
        next(ahead)


def test_a_loop_that_ends_early_lets_go_of_no_copy_under_way(device):
    ahead = copied_ahead(device.torch_device)(batches())
    next(ahead)
    ahead.close()  # pyright: ignore[reportAttributeAccessIssue]
    assert device.hazards == 0


def test_nothing_and_one_batch():
    with fake_device() as device:
        assert list(copied_ahead(device.torch_device)(iter(()))) == []
        assert len(list(copied_ahead(device.torch_device)(batches(1)))) == 1


@pytest.mark.parametrize(("kind", "helps"), [("cpu", False), ("mps", False), ("meta", False), ("cuda", True)])
def test_only_a_memory_of_its_own_is_copied_to(kind, helps):
    assert copies_help(torch.device(kind)) is helps
