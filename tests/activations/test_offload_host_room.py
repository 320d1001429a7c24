"""`host_bytes="auto"`: activations move as far as the host's memory is free, asked once a pass while it is short."""

from types import SimpleNamespace

import pytest

from lightning_memkit.activations import offload as offloading
from lightning_memkit.activations.offload import offload_activations
from tests.activations.offload_models import DEPTH, Deep, gradients, host_as_device, ids

KIB, GIB = 1 << 10, 1 << 30


@pytest.fixture
def host(monkeypatch):
    """A host whose memory a test sets; an offload's buffers take of it, and it counts how often it is asked."""
    host = SimpleNamespace(total=GIB, asked=0, taken=lambda: 0)

    def limits():
        host.asked += 1
        return [SimpleNamespace(free_bytes=64 * GIB), SimpleNamespace(free_bytes=host.total - host.taken())]

    monkeypatch.setattr(offloading, "host_limits", limits)
    with host_as_device():
        yield host


@pytest.mark.filterwarnings("ignore:.*Raise host_bytes:UserWarning")
def test_a_host_that_grows_takes_more_in_the_next_pass_and_one_that_is_full_none(host):
    model = Deep()
    host.total = 0
    with offload_activations(model, min_bytes=1, pin_memory=False) as offload:
        asked = host.asked
        gradients(model, ids())
        assert offload.counts.moved_bytes == 0
        assert offload.counts.kept_bytes > 0
        assert asked < host.asked <= asked + DEPTH  # not for each tensor
        host.total = GIB
        kept = offload.counts.kept_bytes
        gradients(model, ids())
        assert offload.counts.moved_bytes > 0
        assert offload.counts.kept_bytes == kept
        asked = host.asked
        gradients(model, ids())
        assert host.asked == asked  # there is room: nobody is asked


@pytest.mark.filterwarnings("ignore:.*Raise host_bytes:UserWarning")
def test_half_of_what_is_free_is_taken_and_a_given_number_asks_nobody(host):
    model = Deep()
    with offload_activations(model, min_bytes=1, pin_memory=False) as offload:
        gradients(model, ids())
        whole = offload.counts.host_bytes
    host.total = whole
    with offload_activations(model, min_bytes=1, pin_memory=False) as offload:
        host.taken = lambda: offload.counts.host_bytes
        gradients(model, ids())
        assert (
            0 < offload.counts.host_bytes <= 0.75 * whole
        )  # half, and half of the rest when that is reached
        assert offload.counts.kept_bytes > 0
    asked = host.asked
    with offload_activations(model, min_bytes=1, pin_memory=False, host_bytes=4 * KIB) as offload:
        gradients(model, ids())
        assert offload.counts.host_bytes <= 4 * KIB
    assert host.asked == asked
