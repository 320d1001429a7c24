"""The facts about a card's host that need no card: its memory, and whether it grows while some is pinned."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_memkit.activations import offload
from scripts import card_facts

GIB = 1 << 30
DEVICE = torch.device("cuda", 0)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A host of 8 GiB, 6 of them free, in a container of at most 64; `grows` bytes come when it is written to."""
    host = SimpleNamespace(total=8 * GIB, free=6 * GIB, grows=0, pinned=[], returned=0)

    def limits() -> list[Any]:
        return [
            SimpleNamespace(source="RAM", total_bytes=host.total, free_bytes=host.free),
            SimpleNamespace(source="memory.max", total_bytes=64 * GIB, free_bytes=60 * GIB),
        ]

    def pinned(size: int) -> object:
        host.pinned.append(size)
        host.total += host.grows
        host.free += host.grows - size
        return object()

    def give_back() -> None:
        host.returned += 1

    monkeypatch.setattr(card_facts, "host_limits", limits)
    monkeypatch.setattr(offload, "host_limits", limits)
    monkeypatch.setattr(card_facts, "pinned_buffer", pinned)
    monkeypatch.setattr(card_facts, "return_pinned", give_back)
    return host


def test_the_host_s_memory_is_noted_by_each_limit(host, monkeypatch):
    monkeypatch.setattr(card_facts, "lock_limit", lambda: 8 * GIB)
    assert list(card_facts.host(DEVICE)) == [
        {"what": "host memory: RAM", "total_bytes": 8 * GIB, "free_bytes": 6 * GIB},
        {"what": "host memory: memory.max", "total_bytes": 64 * GIB, "free_bytes": 60 * GIB},
        {"what": "host memory that may be locked (ulimit -l)", "total_bytes": 8 * GIB},
        {"what": 'host_bytes="auto" of activation offload', "found_bytes": 3 * GIB},
    ]
    assert host.pinned == []  # the first fact takes nothing


@pytest.mark.parametrize(("grows", "auto_after"), [(0, 2.25 * GIB), (4 * GIB, 4.25 * GIB)])
def test_whether_the_host_grows_is_seen_by_pinning_a_quarter_of_it(host, grows, auto_after):
    host.grows = grows
    (row,) = card_facts.growth(DEVICE)
    assert host.pinned == [row["pinned_bytes"]] == [1.5 * GIB]
    assert (row["total_bytes_before"], row["total_bytes_after"]) == (8 * GIB, 8 * GIB + grows)
    assert (row["auto_bytes_before"], row["auto_bytes_after"]) == (3 * GIB, auto_after)
    assert row["grew"] is (grows > 0)
    assert host.returned == 1


def test_no_more_than_four_gib_are_pinned_of_a_large_host(host):
    host.total = host.free = 500 * GIB
    next(iter(card_facts.growth(DEVICE)))
    assert host.pinned == [4 * GIB]


def test_the_limit_of_locked_memory_is_that_of_the_system(monkeypatch):
    resource = pytest.importorskip("resource")
    for limit, said in ((4096, 4096), (resource.RLIM_INFINITY, None)):
        monkeypatch.setattr(resource, "getrlimit", lambda name, limit=limit: (limit, limit))
        assert card_facts.lock_limit() == said


def test_both_facts_are_asked(monkeypatch, tmp_path):
    """The host before anything else, and its growth last: what grew before would not be seen."""
    asked: list[str] = []
    names = ("host", "context", "workspaces", "attention", "copies", "launches", "pinned", "growth")
    for name in names:
        monkeypatch.setattr(
            card_facts, name, lambda device, name=name: asked.append(name) or [{"what": name}]
        )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(card_facts, "versions", str)  # cuDNN's is asked of the card
    monkeypatch.setattr(card_facts, "record", lambda report, *args, **kwargs: report)
    monkeypatch.setattr("sys.argv", ["card_facts", "--results", str(tmp_path)])
    assert card_facts.main() == 0
    assert asked == list(names)
