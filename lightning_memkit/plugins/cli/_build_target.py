"""The device and dtype that a config's `trainer` section trains with; models are built there directly."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from jsonargparse import Namespace
from lightning.pytorch.accelerators import CUDAAccelerator, MPSAccelerator
from lightning.pytorch.plugins.precision import Precision

from lightning_memkit.initialization.building import build_empty, build_on
from lightning_memkit.plugins.callbacks.initial_weights import InitialWeights
from lightning_memkit.plugins.strategies.on_device import parameter_dtype

_LAUNCHED_LATE = (
    "spawn",
    "fork",
    "notebook",
)  # start methods whose training processes don't exist yet when the model is built


@contextmanager
def build_context(trainer: Namespace) -> Iterator[None]:
    """Build modules on the device and dtype that the `trainer` section of a parsed config trains with."""
    dtype = target_dtype(trainer)
    if dtype is None:
        yield
        return
    build = build_empty if _starts_from_weights(trainer) else build_on
    with build(target_device(trainer), dtype):
        yield


def target_dtype(trainer: Namespace) -> torch.dtype | None:
    """The parameters' dtype under a `trainer` section; None if a foreign precision plugin decides it."""
    plugin = precision_plugin(trainer)
    if plugin is None:
        precision = trainer.get("precision")
        return parameter_dtype(None if precision is None else str(precision))
    if isinstance(plugin, Precision):
        return parameter_dtype(plugin)
    name = plugin.get("init_args", Namespace()).get("precision") or class_of(plugin).precision
    return parameter_dtype(str(name))


def target_device(trainer: Namespace, environ: Mapping[str, str] = os.environ) -> torch.device:
    """The device on which this process will train; the CPU if training processes are started later."""
    strategy = trainer.get("strategy")
    name = strategy if isinstance(strategy, str) else ""
    options = strategy.get("init_args", Namespace()) if isinstance(strategy, Namespace) else Namespace()
    if any(word in name + str(options.get("start_method", "")) for word in _LAUNCHED_LATE):
        return torch.device("cpu")
    if options.get("device") not in (None, "auto"):
        return torch.device(options.device)
    accelerator = trainer.get("accelerator") or "auto"
    if accelerator in ("auto", "gpu", "cuda") and CUDAAccelerator.is_available():
        devices = trainer.get("devices") or "auto"
        count = CUDAAccelerator.auto_device_count() if devices == "auto" else devices
        indices = CUDAAccelerator.parse_devices(count) or [0]
        rank = int(environ.get("LOCAL_RANK", environ.get("SLURM_LOCALID", 0)))
        return torch.device("cuda", indices[rank % len(indices)])
    if accelerator in ("auto", "gpu", "mps") and MPSAccelerator.is_available():
        return torch.device("mps", 0)
    return torch.device("cpu")


def precision_plugin(trainer: Namespace) -> Any:
    """The precision plugin in a `trainer` section, as an instance or its namespace; None if there is none."""
    strategy = trainer.get("strategy")
    inside = strategy.get("init_args", Namespace()) if isinstance(strategy, Namespace) else Namespace()
    plugins = trainer.get("plugins") or []
    candidates = [
        *(plugins if isinstance(plugins, (list, tuple)) else [plugins]),
        inside.get("precision_plugin"),
    ]
    return next((plugin for plugin in candidates if _is_precision(plugin)), None)


def refuse_two_precisions(trainer: Namespace) -> None:
    """Raise if `precision` and a precision plugin are both given: Lightning would drop one or fail late."""
    plugin, precision = precision_plugin(trainer), trainer.get("precision")
    if plugin is not None and precision is not None:
        name = type(plugin).__name__ if isinstance(plugin, Precision) else class_of(plugin).__name__
        raise ValueError(
            f"trainer.precision={precision!r} stands beside the precision plugin {name}; a run has one precision: "
            "remove trainer.precision."
        )


def entries(trainer: Namespace, key: str) -> list[Namespace]:
    """The classes that a `trainer` section names under a key, with one or with a list."""
    given = trainer.get(key) or []
    listed = given if isinstance(given, (list, tuple)) else [given]
    return [one for one in listed if isinstance(one, Namespace) and "class_path" in one]


def _starts_from_weights(trainer: Namespace) -> bool:
    """Whether weight files provide every weight, so that the model need not initialise its own."""
    return any(
        class_of(one) is InitialWeights and one.get("init_args", Namespace()).get("strict", True)
        for one in entries(trainer, "callbacks")
    )


def _is_precision(plugin: Any) -> bool:
    if isinstance(plugin, Namespace) and "class_path" in plugin:
        cls = class_of(plugin)
        return isinstance(cls, type) and issubclass(cls, Precision)
    return isinstance(plugin, Precision)


def class_of(plugin: Namespace) -> Any:
    """The class of an entry."""
    module, _, name = plugin.class_path.rpartition(".")
    return getattr(__import__(module, fromlist=[name]), name)
