"""Cache the fastest micro-batch size in the user's cache folder, by model, data and device."""

import hashlib
import inspect
import json
import math
import platform
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_memkit.memory.measure import capacity
from lightning_memkit.micro_batching import batch_size
from lightning_memkit.micro_batching.run import Run, Step
from lightning_memkit.utilities.cached_answers import SWITCH, keep, kept_file, recall

_FORMAT = 1
_PACKAGES = ("torch", "lightning", "lightning_memkit", "transformers")


@dataclass(frozen=True, kw_only=True)
class TunedSize:
    """The result of a tuning.

    Args:
        micro_batch_size: the fastest size that fits.
        peak_bytes: the peak of the largest size that was measured.
        elements_per_second: by size, how many elements of batches were trained on per second.
    """

    micro_batch_size: int
    peak_bytes: int
    elements_per_second: Mapping[int, float]


class TunedSizes:
    """Reads and writes the cached answer to one question; all ranks get rank 0's.

    `MEMKIT_TUNING_CACHE=0` in the environment turns the cache off. A file that can't be read is ignored; one
    that can't be written causes a warning.

    Args:
        run: the training loop.
        question: the cache key: all that the answer depends on, see `question_of`.
    """

    def __init__(self, run: Run, question: Mapping[str, Any]) -> None:
        self._run = run
        canonical = json.dumps(question, sort_keys=True, separators=(",", ":"))
        self._key = hashlib.sha256(canonical.encode()).hexdigest()

    @property
    def path(self) -> Path:
        """The file that holds the answer."""
        return kept_file("tuned_sizes", self._key)

    def recall(self) -> TunedSize | None:
        """The cached answer, if there is one."""
        return self._run.of_first_rank(self._read)

    def keep(self, answer: TunedSize) -> None:
        """Write the answer, atomically."""
        if not self._run.is_first_rank:
            return
        content = {
            "format": _FORMAT,
            "key": self._key,
            "micro_batch_size": answer.micro_batch_size,
            "peak_bytes": answer.peak_bytes,
            "elements_per_second": {str(size): speed for size, speed in answer.elements_per_second.items()},
        }
        try:
            keep(self.path, content)
        except OSError as error:
            self._run.warn(
                f"MemoryBudget can't keep the tuned size in {self.path} ({error}); it is measured again next time. "
                f"Set XDG_CACHE_HOME to a folder that can be written to, or {SWITCH}=0."
            )

    def _read(self) -> TunedSize | None:
        try:
            content = recall(self.path)
            if (
                content is None
                or content["format"] != _FORMAT
                or content["key"] != self._key
                or content["micro_batch_size"] < 1
            ):
                return None
            return TunedSize(
                micro_batch_size=int(content["micro_batch_size"]),
                peak_bytes=int(content["peak_bytes"]),
                elements_per_second={
                    int(size): speed for size, speed in content["elements_per_second"].items()
                },
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            self._run.debug(f"MemoryBudget passes over {self.path}: {error!r}")
            return None


def question_of(step: Step, *, budget: object, usable_bytes: int) -> dict[str, Any]:
    """All that the fastest size depends on, as plain JSON: model, data, optimizer, precision, device, versions.

    Args:
        step: the first step.
        budget: the budget as the user wrote it. `"auto"` or a fraction gives slightly other bytes in every
            run, so they are rounded to a sixteenth of a power of two.
        usable_bytes: the budget in bytes, less its headroom.
    """
    run = step.run
    exact = isinstance(budget, int) or (isinstance(budget, str) and budget != "auto")
    return {
        "usable_bytes": usable_bytes if exact else f"2^{round(16 * math.log2(max(usable_bytes, 1))) / 16}",
        "model": _model(run.module),
        "batch": [batch_size(step.batch), _structure(step.batch, sizes=False)],
        "worst_sample": _structure(run.worst_batch(step.batch, 1), sizes=True),
        "batches_a_step": run.batches_a_step,
        "optimizer": _optimizer(step.optimizer),
        "trainer": _settings(run),
        "device": _device(run.device),
        "versions": {name: _version(name) for name in _PACKAGES if name in sys.modules},
    }


def _model(module: nn.Module) -> dict[str, Any]:
    try:
        source = inspect.getsource(type(module))
    except (OSError, TypeError):
        source = ""  # typed into a console: only the layers identify the model
    return {
        "class": class_name(module),
        "source": hashlib.sha256(source.encode()).hexdigest(),
        "layers": without_addresses(repr(module)),
        "parameters": [
            [name, [*p.shape], str(p.dtype), p.requires_grad] for name, p in module.named_parameters()
        ],
        "buffers": [[name, [*buffer.shape], str(buffer.dtype)] for name, buffer in module.named_buffers()],
    }


def _structure(item: Any, *, sizes: bool) -> Any:
    """Types, dtypes and shapes (or only the number of dimensions) of any nested structure."""
    if isinstance(item, Tensor):
        return [str(item.dtype), [*item.shape] if sizes else item.ndim]
    if isinstance(item, Mapping):
        return {str(key): _structure(value, sizes=sizes) for key, value in item.items()}
    if isinstance(item, (list, tuple)):
        return [_structure(value, sizes=sizes) for value in item]
    if hasattr(item, "__dataclass_fields__"):
        return [class_name(item), _structure(vars(item), sizes=sizes)]
    return class_name(item)


def _optimizer(optimizer: Optimizer) -> list[Any]:
    """The class and its options; of numbers only whether they are zero: a momentum of 0 has no state."""
    groups = []
    for group in optimizer.param_groups:
        options = {name: value for name, value in group.items() if name != "params"}
        groups.append(
            {
                name: bool(value) if _is_number(value) else without_addresses(str(value))
                for name, value in options.items()
            }
        )
    return [class_name(optimizer), groups]


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1)


def _settings(run: Run) -> dict[str, Any]:
    return {
        **run.settings(),
        "ranks": run.world_size,
        "matmul": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "detects_anomalies": torch.is_anomaly_enabled(),
    }


def _device(device: torch.device) -> list[Any]:
    total = capacity(device).total_bytes
    if device.type == "cuda":
        return [torch.cuda.get_device_name(device), total]
    return [device.type, _processor(), total, torch.get_num_threads()]


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1] if found else f"{platform.machine()} {platform.processor()}"


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "unknown"


def class_name(item: object) -> str:
    """The full name of an object's class."""
    return f"{type(item).__module__}.{type(item).__qualname__}"


def without_addresses(text: str) -> str:
    """A `repr` without memory addresses."""
    return re.sub(r" at 0x[0-9a-f]+", "", text)
