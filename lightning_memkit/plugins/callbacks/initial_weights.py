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
    """Starts a module from weights in files, under any strategy; reads 16 MiB at a time.

    The LightningModule needs no code for it. Weights are streamed in once, directly to each parameter's
    device and dtype: at setup, or right after `configure_model`. With `strict`, the parameters that
    `configure_model` creates take no memory until then. Under `FSDP2Strategy` each rank reads only its shard,
    and the whole model never takes memory. When a checkpoint is resumed, its weights replace these.

    Args:
        source: a `.safetensors` file, an index or a folder of them, a torch or Lightning checkpoint, or a folder of
            torch.distributed.checkpoint.
        rename: prefixes of names in the source and their replacements in the module, such as `{"": "model."}`
            if the LightningModule keeps the model as `self.model`; null skips names with that prefix.
        strict: refuse names that only the source or only the module has; false leaves such parameters as
            initialised.

    Raises:
        WeightsError: at setup, if files are incomplete or don't match the module; nothing has been loaded
            then.

    Limits: a `configure_model` that reads parameter values needs `strict=False`. So does one that must draw
    the same random numbers with and without this callback: initialisers of parameters without memory draw
    none.
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
        # A copied Trainer goes on with the copied module, which is loaded already: point to that one.
        module = state["_loaded"]
        vars(self).update({**state, "_loaded": None if module is None else weakref.ref(module)})

    def __repr__(self) -> str:
        return f"{type(self).__name__}(source={self.source!r}, rename={self.rename!r}, strict={self.strict})"

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Load into a module that exists; otherwise arrange to load when it is built or sharded."""
        if self._loaded is not None and self._loaded() is pl_module:
            return  # loaded before: don't overwrite trained weights, as in a test after a fit
        if _is_simulated(pl_module):
            return  # tensors of a prediction have no values to load
        strategy: Any = trainer.strategy
        if hasattr(strategy, "shards_by"):
            strategy.initial_weights = self.load
        elif is_overridden("configure_model", pl_module):
            self._load_after_configure_model(trainer, pl_module)
        else:
            self.load(pl_module, strategy.root_device)

    def load(self, module: nn.Module, device: torch.device) -> None:
        """Load the weights; parameters without memory are allocated on `device`."""
        try:
            load_weights(module, self.source, strict=self.strict, rename=self.rename, device=device)
            materialize(module, device)
        except Exception:
            _let_lightning_end(module, device)
            raise
        self._loaded = weakref.ref(module)

    def load_early(self, trainer: Trainer, module: LightningModule, device: torch.device) -> None:
        """Load a config's module before anything reads it; sharded or late-built ones load later."""
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
                    torch.set_default_dtype(default)  # buffers get the dtype that they have without this
                    plain()
            self.load(own, device)

        undo = replace_method(module, "configure_model", configure_model)


def _let_lightning_end(module: nn.Module, device: torch.device) -> None:
    """Give meta tensors memory, or Lightning's final `module.cpu()` would fail and hide the first error."""
    bare = [tensor for tensor in (*module.parameters(), *module.buffers()) if tensor.is_meta]
    shards = [tensor for tensor in bare if isinstance(tensor, DTensor)]
    give_memory(module, shards, device)
    give_memory(module, bare, "cpu")  # untouched pages take no physical memory


def _is_simulated(module: nn.Module) -> bool:
    fakes = any(isinstance(parameter, FakeTensor) for parameter in module.parameters())
    return fakes or detect_fake_mode() is not None
