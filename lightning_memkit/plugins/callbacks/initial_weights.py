"""The Lightning adapter of `load_weights`: training starts from weights in files."""

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor

from lightning_memkit.initialization import load_weights
from lightning_memkit.initialization.building import build_empty
from lightning_memkit.initialization.materialization import give_memory, materialize
from lightning_memkit.plugins.strategies.on_device import parameter_dtype
from lightning_memkit.utilities.patching import replace_method


class InitialWeights(Callback):
    """Starts a module from weights in files, under any strategy; beside the model 16 MiB at a time are read.

    The LightningModule needs no code for it. Weights are streamed in once, straight to each parameter's device and
    dtype: when the run is set up, or right after `configure_model`, whose parameters have no memory before that where
    `strict` is true. Under `FSDP2Strategy` each rank reads its shard, and they never have. A checkpoint that is
    resumed counts instead.

    Args:
        source: a `.safetensors` file, an index or a folder of them, a torch or Lightning checkpoint, or a folder of
            torch.distributed.checkpoint.
        rename: beginnings of the names in the source, and what stands for them in the LightningModule:
            `{"": "model."}` where it keeps the model as `self.model`; null skips such names.
        strict: refuse names that only one of the two has; false leaves them as they are initialised.

    Raises:
        WeightsError: at setup, where the files are not whole or don't fit; nothing was loaded then.

    Limits: a `configure_model` that reads the values of parameters needs `strict=False`, as does one that draws
    random numbers and shall draw the same ones with and without this: initialisers of parameters without memory
    draw none.
    """

    def __init__(
        self, source: str, rename: Mapping[str, str | None] | None = None, strict: bool = True
    ) -> None:
        self.source = source
        self.rename = dict(rename or {})
        self.strict = strict
        self._loaded: weakref.ref[nn.Module] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_loaded": None if self._loaded is None else self._loaded()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # A copy of a Trainer goes on with the copied module, into which nothing is to be loaded once more.
        module = state["_loaded"]
        vars(self).update({**state, "_loaded": None if module is None else weakref.ref(module)})

    def __repr__(self) -> str:
        return f"{type(self).__name__}(source={self.source!r}, rename={self.rename!r}, strict={self.strict})"

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Load into a module that exists; see to it that a later one is loaded where it is built or sharded."""
        if self._loaded is not None and self._loaded() is pl_module:
            return  # a test after training tests what was trained
        if _is_simulated(pl_module):
            return  # a prediction has no values, and needs none
        strategy: Any = trainer.strategy
        if hasattr(strategy, "shards_by"):
            strategy.initial_weights = self.load
        elif is_overridden("configure_model", pl_module):
            self._load_after_configure_model(trainer, pl_module)
        else:
            self.load(pl_module, strategy.root_device)

    def load(self, module: nn.Module, device: torch.device) -> None:
        """Load the weights; the device is for parameters that have no memory yet."""
        try:
            load_weights(module, self.source, strict=self.strict, rename=self.rename, device=device)
            materialize(module, device)
        except Exception:
            _let_lightning_end(module, device)
            raise
        self._loaded = weakref.ref(module)

    def load_early(self, trainer: Trainer, module: LightningModule, device: torch.device) -> None:
        """Load into a module of a config before anything looks at it; what is sharded or built late comes later."""
        if not is_overridden("configure_model", module) and not hasattr(trainer.strategy, "shards_by"):
            self.load(module, device)

    def _load_after_configure_model(self, trainer: Trainer, module: LightningModule) -> None:
        device = trainer.strategy.root_device
        dtype = parameter_dtype(trainer.precision_plugin) if self.strict else None

        def configure_model(own: Any, plain: Any) -> None:
            undo()
            if dtype is None:
                plain()
            else:
                default = torch.get_default_dtype()
                with build_empty(device, dtype):
                    torch.set_default_dtype(default)  # tables are those of a run without this
                    plain()
            self.load(own, device)

        undo = replace_method(module, "configure_model", configure_model)


def _let_lightning_end(module: nn.Module, device: torch.device) -> None:
    """Lightning ends with `module.cpu()`, which fails for what has no memory: its error would hide the first one."""
    bare = [tensor for tensor in (*module.parameters(), *module.buffers()) if tensor.is_meta]
    shards = [tensor for tensor in bare if isinstance(tensor, DTensor)]
    give_memory(module, shards, device)
    give_memory(module, bare, "cpu")  # pages that nobody writes to are none


def _is_simulated(module: nn.Module) -> bool:
    fakes = any(isinstance(parameter, FakeTensor) for parameter in module.parameters())
    return fakes or detect_fake_mode() is not None
