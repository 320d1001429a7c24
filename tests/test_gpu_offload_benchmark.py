"""The offload benchmark for GPUs, run through on a device without hardware at a tiny size."""

from benchmarks import _gpu_offload
from benchmarks.harness import Options, Ratio
from tests.testing.fake_device import fake_device
from tests.testing.needs import NEEDS_COMPILER

pytestmark = NEEDS_COMPILER


def test_every_way_is_measured_and_changes_no_bit(monkeypatch):
    monkeypatch.setattr(_gpu_offload, "paired_ratio", lambda *_, **__: Ratio(1.0, 1.0, 1.0, 100))
    size = _gpu_offload.Size(width=32, heads=2, depth=6, rows=2, length=64, min_bytes=1024)
    with fake_device() as device:
        report = _gpu_offload.measure(device.torch_device, size, Options())
    figures = report.figures
    for way in _gpu_offload.WAYS:
        assert figures[f"gpu_{way}_same_bits"] is True
        assert figures[f"gpu_{way}_peak_fraction"] < 0.8
    assert figures["gpu_offload_peak_fraction"] < 0.6
    assert len(report.rows) == 1 + len(_gpu_offload.WAYS)
