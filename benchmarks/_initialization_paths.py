"""The ways to a loaded model that benchmarks/initialization.py sets side by side, each in a process of its own."""

import multiprocessing
import os
import warnings
import weakref
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.harness import Ratio, one_thread, paired_ratio
from lightning_memkit import InitialWeights, OnDeviceStrategy, PureBF16Precision
from lightning_memkit.initialization import build_empty, build_on, load_weights

SIZES = {
    "full": {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 8, "vocab_size": 32000},
    "quick": {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 4, "vocab_size": 8000},
}
_WARM_UP = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "vocab_size": 64}


class Float32Bytes(TorchDispatchMode):
    """The most bytes of float32 tensors alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = self.peak_bytes = 0
        self._known: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count what an operator makes."""
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.dtype == torch.float32 and not tensor.is_meta:
                storage = tensor.untyped_storage()
                key, size = storage._cdata, storage.nbytes()
                if key not in self._known:
                    self.live_bytes += size
                    self.peak_bytes = max(self.peak_bytes, self.live_bytes)
                    self._known[key] = weakref.ref(storage, lambda _, k=key, s=size: self._gone(k, s))
        return out

    def _gone(self, key: int, size: int) -> None:
        del self._known[key]
        self.live_bytes -= size


def in_own_process(work: Callable[..., Any], *arguments: Any) -> Any:
    """What `work` returns, run in a fresh interpreter."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(work, *arguments).result()


def model_of(options: dict[str, int]) -> nn.Module:
    """A Llama, in the dtype and on the device of the context."""
    from transformers import LlamaConfig, LlamaForCausalLM

    heads: dict[str, Any] = {"num_attention_heads": 16, "num_key_value_heads": 16}
    return LlamaForCausalLM(LlamaConfig(**{**heads, **options}))


def save(options: dict[str, int], folder: Path, shard_bytes: int) -> int:
    """Write a bfloat16 model of random values as sharded safetensors with their index; its bytes."""
    torch.manual_seed(0)
    with build_on("cpu", torch.bfloat16):
        model = model_of(options)
    model.save_pretrained(folder, max_shard_size=shard_bytes)  # pyright: ignore[reportCallIssue]
    return bytes_of(model)


def bytes_of(model: nn.Module) -> int:
    """The bytes of parameters and buffers, ties once."""
    return sum(tensor.nbytes for tensor in {*model.parameters(), *model.buffers()})


def streamed(options: dict[str, int], folder: Path) -> nn.Module:
    """Ours: parameters get their memory when their values come."""
    with build_empty("cpu", torch.bfloat16):
        model = model_of(options)
    load_weights(model, folder, device="cpu")
    return model


def built_and_streamed(options: dict[str, int], folder: Path) -> nn.Module:
    """Ours, where the model has random values first: a module that was built before its weights were known."""
    with build_on("cpu", torch.bfloat16):
        model = model_of(options)
    load_weights(model, folder)
    return model


class _Late(LightningModule):
    """Built by Lightning, in `configure_model`."""

    def __init__(self, options: dict[str, int]) -> None:
        super().__init__()
        self.options, self.model = options, None

    def configure_model(self) -> None:
        if self.model is None:
            self.model = model_of(self.options)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Nothing: the model is loaded."""


class _Watched(InitialWeights):
    """Notes the peak when the weights are there, with every value read: what a strategy does next isn't loading."""

    def load(self, module: nn.Module, device: torch.device) -> None:
        super().load(module, device)
        with torch._C.DisableTorchFunction():  # the contexts of `configure_model` are open
            _sum(module)
        _LOADED.append(_resident("VmHWM"))


_LOADED: list[int] = []


def _configured(options: dict[str, int], folder: Path, strategy: Any, strict: bool) -> nn.Module:
    trainer = Trainer(
        accelerator="cpu", devices=1, strategy=strategy, plugins=[PureBF16Precision()], logger=False,
        callbacks=[_Watched(str(folder), rename={"": "model."}, strict=strict)], enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    module = _Late(options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # advice on loaders
        trainer.validate(module, [0], verbose=False)
    assert module.model is not None
    return module.model


def configured(options: dict[str, int], folder: Path) -> nn.Module:
    """Ours, in Lightning: what `configure_model` builds gets its values from files alone."""
    return _configured(options, folder, OnDeviceStrategy(), strict=True)


def configured_under_ddp(options: dict[str, int], folder: Path) -> nn.Module:
    """The same under Lightning's own DDP, of one process."""
    return _configured(options, folder, "ddp", strict=True)


def initialised(options: dict[str, int], folder: Path) -> nn.Module:
    """Ours, in Lightning, where files need not give everything: the model is initialised, then loaded."""
    return _configured(options, folder, OnDeviceStrategy(), strict=False)


def stock(options: dict[str, int], folder: Path) -> nn.Module:
    """Build in float32, load every file, cast."""
    model = model_of(options)
    state: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        state.update(load_file(file))
    model.load_state_dict(state)
    del state
    return model.to(torch.bfloat16)


def from_pretrained(options: dict[str, int], folder: Path) -> nn.Module:
    """As transformers does it for its own models."""
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)  # pyright: ignore[reportReturnType]


PATHS = {
    "streamed": streamed,
    "built, streamed": built_and_streamed,
    "configure_model, OnDeviceStrategy": configured,
    "configure_model, DDP": configured_under_ddp,
    "configure_model, strict=False": initialised,
    "stock": stock,
    "from_pretrained": from_pretrained,
}


def measured(path: str, options: dict[str, int], folder: Path, small: Path) -> dict[str, int]:
    """Peak resident bytes of this process above those before the build, and what the model is."""
    run = PATHS[path]
    with one_thread():
        run(_WARM_UP, small)  # what libraries and kernels keep is not the model's
        _LOADED.clear()
        before = _resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
        model = run(options, folder)
        checked = _sum(model)  # reads every value: maps of files count only then
        later = _resident("VmHWM")
    return {
        "peak_bytes": (_LOADED or [later])[0] - before,
        "peak_after_setup_bytes": later - before,
        "model_bytes": bytes_of(model),
        "largest_bytes": max(parameter.nbytes for parameter in model.parameters()),
        "values": hash(checked),
    }


def staged(path: str, options: dict[str, int], folder: Path) -> int:
    """The most float32 bytes alive at once, beside those of the model that is left."""
    with one_thread(), Float32Bytes() as counter:
        model = PATHS[path](options, folder)
    kept = {*model.parameters(), *model.buffers()}
    return counter.peak_bytes - sum(t.nbytes for t in kept if t.dtype == torch.float32)


def timed(options: dict[str, int], folder: Path, pairs: int, seed: int) -> tuple[Ratio, Ratio]:
    """Loading into a model that exists, against reading the files into memory that exists; and against itself."""
    with one_thread():
        model = streamed(options, folder)
        files = sorted(folder.glob("*.safetensors"))
        memory = memoryview(bytearray(max(os.path.getsize(file) for file in files)))

        def load() -> None:
            load_weights(model, folder)

        def read() -> None:
            for file in files:
                with open(file, "rb", buffering=0) as stream:
                    while stream.readinto(memory):
                        pass

        against_reading = paired_ratio(load, read, pairs=pairs, seed=seed)
        return against_reading, paired_ratio(load, load, pairs=pairs, seed=seed)


def save_small(folder: Path) -> None:
    """The model of the warm-up."""
    save(_WARM_UP, folder, 2**16)


def _sum(model: nn.Module) -> float:
    pieces = (piece for parameter in model.parameters() for piece in parameter.detach().view(-1).split(2**18))
    return sum(float(piece.sum(dtype=torch.float64)) for piece in pieces)


def _resident(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(name + ":"))
