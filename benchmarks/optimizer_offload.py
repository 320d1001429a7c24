"""Optimizer states in host memory on a GPU: the time of a training step, and the bytes that it saves.

A decoder of a billion parameters trains through Lightning with and without `OptimizerOffload`, in float32 under
bf16-mixed and under `PureBF16Precision`. Every state crosses to the device and back in each step: `copy_ms` is what
that takes at the measured rates where both directions run at once, `extra_ms` what the step takes more. Where it is
less than the copies, they ran beside other work.
"""

from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from benchmarks.__main__ import main_of
from benchmarks._gpu_offload import Layer
from benchmarks._gpu_rows import GpuRow, Values, at_least, needs_cuda
from benchmarks._gpu_size import DecoderSize, GpuSize
from benchmarks._gpu_training import Fitted, Repeated, timed_fit
from benchmarks.harness import Options
from lightning_memkit import OptimizerOffload, PureBF16Precision
from lightning_memkit.activations.offload_choice import measure_copy_rates
from lightning_memkit.initialization import build_on

STEPS = 10
STATE_BYTES = {"float32": 8, "kahan": 6}  # a parameter
LEAST_SAVED = 0.9  # of them: three buckets stay on the device during a step


class Decoder(LightningModule):
    """Decoder layers on random hidden states, with AdamW."""

    def __init__(self, size: DecoderSize) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Layer(size) for _ in range(size.depth)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """A loss of the last layer's output."""
        return self.layers(batch).float().square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW in one kernel."""
        return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=True)


def gpu_rows(options: Options) -> list[GpuRow]:
    """AdamW in float32, and compensated in bfloat16."""
    size = GpuSize.of(options)
    return [
        GpuRow(
            what=f"AdamW, {precision}",
            needs_seconds=size.needs(18 if precision == "float32" else 12),
            run=partial(offloaded, precision, options),
            limits=size.limits(
                {f"{precision}_saved_bytes_per_parameter": at_least(LEAST_SAVED * STATE_BYTES[precision])}
            ),
        )
        for precision in STATE_BYTES
    ]


def offloaded(precision: str, options: Options) -> Values:
    """A training with states on the device, and one with states on the host."""
    needs_cuda(torch.device(options.device))
    plain, parameters = fitted(precision, options, [])
    ours, _ = fitted(precision, options, [OptimizerOffload()])
    rates = measure_copy_rates(torch.device(options.device))
    state_bytes = STATE_BYTES[precision] * parameters
    return {
        f"{precision}_step_ratio": ours.step_seconds / plain.step_seconds,
        f"{precision}_extra_ms": 1000 * (ours.step_seconds - plain.step_seconds),
        f"{precision}_copy_ms": 1000 * state_bytes / min(rates.to_host, rates.to_device),
        f"{precision}_saved_bytes_per_parameter": (plain.resident_bytes - ours.resident_bytes) / parameters,
        f"{precision}_peak_fraction": ours.allocated_bytes / plain.allocated_bytes,
    }


def fitted(precision: str, options: Options, callbacks: list[Any]) -> tuple[Fitted, int]:
    """A training and its number of parameters."""
    device, size = torch.device(options.device), GpuSize.of(options).decoder
    low = precision == "kahan"
    torch.manual_seed(options.seed)
    with build_on(device, torch.bfloat16 if low else torch.float32):
        module = Decoder(size)
    batch = torch.randn(size.rows, size.length, size.width)
    chosen: dict[str, Any] = {"plugins": [PureBF16Precision()]} if low else {"precision": "bf16-mixed"}
    found = timed_fit(module, Repeated(batch, STEPS), device, steps=STEPS, callbacks=callbacks, **chosen)
    return found, sum(parameter.numel() for parameter in module.parameters())


if __name__ == "__main__":
    raise SystemExit(main_of(__file__))
