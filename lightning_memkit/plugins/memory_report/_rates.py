"""The speed of training between two lines of the report."""

from collections.abc import Sequence
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from lightning_memkit.memory.flops import StepFlops
from lightning_memkit.micro_batching import SplitError, batch_size
from lightning_memkit.prediction.devices import Device, devices_meant

_MOSTLY = 0.999  # fraction of a step's FLOPs


class Rates:
    """Tokens or samples a second, fraction of real tokens, and loader stall since the last line."""

    def __init__(self) -> None:
        self._since, self._waited_before = perf_counter(), 0.0
        self._tokens = self._samples = 0
        self._real: int | Tensor = 0
        self._masked = False

    def count(self, batch: Any) -> None:
        """Add a batch: its tokens if it has `input_ids`, and its samples unless it is packed."""
        packed = getattr(batch, "real_tokens", None)
        tokens = tokens_of(batch)
        if packed is not None:
            self._real += int(packed)
            self._tokens += tokens
            self._masked = True
            return
        if tokens:
            mask = batch.get("attention_mask")
            if isinstance(mask, Tensor) and mask.shape == batch["input_ids"].shape:
                self._masked = True
                self._real += (mask != 0).sum()  # a tensor: reading it here would wait for the device
            else:
                self._real += tokens
            self._tokens += tokens
        self._samples += samples_of(batch)

    def take(
        self, waited: float, flops: StepFlops | None = None, device: Device | None = None
    ) -> dict[str, float]:
        """The rates since the last call, by the names under which they are logged.

        Args:
            waited: seconds spent waiting for the loader since the start.
            flops: of a metered step, from which the FLOPs of a token or a sample follow.
            device: the device, if its peak rates are known.
        """
        now = perf_counter()
        seconds = max(now - self._since, 1e-9)
        values = {"loader_stall": min(1.0, (waited - self._waited_before) / seconds)}
        if self._tokens:
            values["tokens_per_second"] = float(self._real) / seconds
            if self._masked:
                values["real_tokens"] = float(self._real) / self._tokens
        if self._samples:
            values["samples_per_second"] = self._samples / seconds
        if flops is not None and flops.units:
            steps = (self._tokens if flops.tokens else self._samples) / flops.units
            values["model_tflops"] = steps * flops.model / seconds / 1e12
            ideal = ideal_seconds(flops, device)
            if ideal is not None:
                values["mfu"] = steps * ideal / seconds
        self.restart(waited, now)
        return values

    def restart(self, waited: float, now: float | None = None) -> None:
        """Start counting anew, to leave out what was not training."""
        self._since, self._waited_before = perf_counter() if now is None else now, waited
        self._tokens = self._samples = 0
        self._real, self._masked = 0, False


def tokens_of(batch: Any) -> int:
    """Tokens of a batch, padding included; 0 where it has no `input_ids`."""
    if isinstance(batch, (Tensor, Sequence)):  # torch warns when a tensor is indexed with a string
        return 0
    try:
        ids = batch["input_ids"]
    except (TypeError, KeyError, IndexError, ValueError):
        return 0
    return ids.numel() if isinstance(ids, Tensor) and not ids.is_floating_point() else 0


def samples_of(batch: Any) -> int:
    """Samples of a batch; 1 if it can't be split."""
    try:
        return batch_size(batch)
    except SplitError:
        return 1


def known_device(device: torch.device) -> Device | None:
    """The known device with this GPU's name; None for others, and for variants with lower clocks."""
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    return named_device(properties.name, properties.total_memory)


def named_device(name: str, memory_bytes: int) -> Device | None:
    """The device that a driver's name means; of several, the one of the closest memory size."""
    found = devices_meant(name)
    return min(found, key=lambda device: abs(device.memory_bytes - memory_bytes), default=None)


def ideal_seconds(flops: StepFlops, device: Device | None) -> float | None:
    """Seconds for a step's model FLOPs at the device's peak; None if unknown, as for float32 run as TF32."""
    if device is None:
        return None
    if flops.share_16_bit < _MOSTLY and torch.get_float32_matmul_precision() != "highest":
        return None
    return flops.seconds_at(device.flops_16, device.flops_32)
