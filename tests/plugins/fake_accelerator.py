"""The device "fake" as Lightning's accelerator."""

from typing import Any

import torch
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.strategies import SingleDeviceStrategy


class FakeAccelerator(Accelerator):
    """One device without hardware."""

    def setup_device(self, device: torch.device) -> None:
        assert device.type == "fake"

    def teardown(self) -> None:
        pass

    @staticmethod
    def parse_devices(devices: Any) -> int:
        return int(devices)

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        return [torch.device("fake", index) for index in range(devices)]

    @staticmethod
    def auto_device_count() -> int:
        return 1

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def name() -> str:
        return "fake"

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        return {}


def on_fake_device() -> dict[str, Any]:
    """Trainer arguments; the device must have been loaded by `fake_device`."""
    strategy = SingleDeviceStrategy(device=torch.device("fake", 0), accelerator=FakeAccelerator())
    return {"devices": 1, "strategy": strategy}
