"""Run on ranks by test_two_ranks.py: two ranks with every policy, under DDP, FSDP2 and tensor parallelism."""

import sys
import warnings
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from lightning_memkit import checkpoint_modules
from lightning_memkit.activations.blocks import find_blocks
from lightning_memkit.activations.planned import resident_bytes
from lightning_memkit.memory.meter import ByteMeter
from tests.activations.models import VOCABULARY, Block, ConvNet, Stack, lora_model, transformers_model
from tests.plugins.ranks import leave

STEPS = 3
POLICIES: dict[str, dict[str, Any]] = {
    "none": {},
    "full": {"policy": "full"},
    "every:2": {"policy": "every:2"},
    "a class": {"policy": "full", "blocks": [Block]},
    "a pattern": {"policy": "full", "blocks": ["blocks.[12]"]},
    "selective": {"policy": "selective"},
    "selective:tanh,matmul/2": {"policy": "selective:tanh,matmul/2"},
    "budget:0.7": {"policy": "budget:0.7"},
    "budget:0.4": {"policy": "budget:0.4"},
    "budget:300KiB": {"policy": "budget:300KiB"},
    "auto:1000KiB": {"policy": "auto:1000KiB"},
}
COMPILED: dict[str, dict[str, Any]] = {
    "compile:0": {"policy": "compile:0"},
    "compile:0.5": {"policy": "compile:0.5"},
}


def plain(module: nn.Module) -> nn.Module:
    """One process, or one of several equal ones."""
    return module


def ddp(module: nn.Module, **options: Any) -> nn.Module:
    """Weights on every rank."""
    return DistributedDataParallel(module, **options)


def fsdp2(module: nn.Module, inside: str = "", **options: Any) -> nn.Module:
    """Each block is a shard of its own, or what lies inside it by that name."""
    options["mesh"] = init_device_mesh("cpu", (2,))
    for _, block in find_blocks(module):
        fully_shard(block.get_submodule(inside), **options)
    return fully_shard(module, **options)  # pyright: ignore[reportReturnType]


def tensor_parallel(module: nn.Module) -> nn.Module:
    """Every rank has half of each matrix and the whole batch."""
    mesh = init_device_mesh("cpu", (2,))
    for _, block in find_blocks(module):
        parallelize_module(block, mesh, {"mix.0": ColwiseParallel(), "mix.2": RowwiseParallel()})
    return module


Wrap = Callable[[nn.Module], nn.Module]
STRATEGIES: dict[str, Wrap] = {"ddp": ddp, "fsdp2": fsdp2}
MORE: dict[str, Wrap] = {
    "ddp, static graph": partial(ddp, static_graph=True),
    "ddp, unused parameters": partial(ddp, find_unused_parameters=True),
    "fsdp2, never resharded": partial(fsdp2, reshard_after_forward=False),
    "fsdp2 inside the blocks": partial(fsdp2, inside="mix"),
    "tensor parallel": tensor_parallel,
}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "stack": partial(Stack, width=32, depth=4, dropout=0.0),
    "batch norm": ConvNet,
    "experts": partial(transformers_model, "MixtralForCausalLM", experts_implementation="eager"),
}
if find_spec("peft") is not None:
    MODELS["lora"] = partial(lora_model, attention_dropout=0.0)


def build(name: str = "stack") -> nn.Module:
    """The same weights everywhere, in float64."""
    torch.manual_seed(0)
    return MODELS[name]().double().train()


def batches(name: str = "stack") -> list[Tensor]:
    """One batch a step, for all ranks."""
    generator = torch.Generator().manual_seed(1)
    if name == "batch norm":
        return [torch.randn(4, 3, 8, 8, generator=generator, dtype=torch.float64) for _ in range(STEPS)]
    return [torch.randint(VOCABULARY, (4, 16), generator=generator) for _ in range(STEPS)]


def train(model: nn.Module, rows: slice, name: str = "stack", counted: bool = True) -> int:
    """Plain gradient descent; the last gradients stay. Returns the bytes alive after the last forward."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    alive = 0
    for batch in batches(name):
        optimizer.zero_grad()
        if counted:
            with ByteMeter() as meter:
                out = model(batch[rows])
                alive = meter.live_bytes
        else:
            out = model(batch[rows])
        getattr(out, "logits", out).square().mean().backward()
        optimizer.step()
    return alive


def result(model: nn.Module) -> list[Tensor]:
    """Weights, gradients of the trained ones, and buffers."""
    tensors = [tensor for p in model.parameters() for tensor in (p.detach(), p.grad) if tensor is not None]
    return [whole(tensor) for tensor in (*tensors, *model.buffers())]


def whole(tensor: Any) -> Tensor:
    """A sharded tensor's full value."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def run(name: str, wrap: Wrap, options: dict[str, Any], wrapped_first: bool = False) -> dict[str, Any]:
    """Train with one policy under one strategy."""
    torch._dynamo.reset()
    counters.clear()
    module = build(name)
    model = wrap(module) if wrapped_first else module
    if options:
        checkpoint_modules(module, **options)
    if not wrapped_first:
        model = wrap(module)
    half = torch.distributed.get_rank() * 2
    rows = slice(None) if wrap is tensor_parallel else slice(half, half + 2)
    compiled = options.get("policy", "").startswith("compile")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        alive_bytes = train(model, rows, name, counted=not compiled)
    return {
        "tensors": result(module),
        "resident_bytes": resident_bytes(module),
        "alive_bytes": alive_bytes,
        "graphs": counters["stats"]["unique_graphs"],
        "said": [str(warning.message) for warning in said],
    }


def main(path: str, part: str) -> None:
    """Save what every model, strategy and policy of one part of the sweep gave."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    found: dict[tuple[str, ...], Any] = {}
    for key, arguments in cases(part).items():
        found[key] = run(*arguments)
    torch.save(found, f"{path}.{torch.distributed.get_rank()}")
    leave()


def cases(part: str) -> dict[tuple[str, ...], tuple[Any, ...]]:
    """(model, strategy, policy) of a part, with the arguments of `run`."""
    if part == "sample":
        return {
            ("stack", strategy, policy): ("stack", wrap, options)
            for strategy, wrap in STRATEGIES.items()
            for policy, options in POLICIES.items()
        }
    if part == "compiled":
        return {
            ("stack", strategy, policy): ("stack", wrap, options)
            for strategy, wrap in (STRATEGIES | MORE).items()
            for policy, options in ({"none": {}} | COMPILED).items()
        }
    by_string = {name: options for name, options in POLICIES.items() if "blocks" not in options}
    return {
        ("stack", strategy, policy): ("stack", wrap, options)
        for strategy, wrap in MORE.items()
        for policy, options in POLICIES.items()
    } | {
        (name, strategy + order, policy): (name, wrap, options, bool(order))
        for name in MODELS
        for strategy, wrap in STRATEGIES.items()
        for order in ("", " first")
        for policy, options in by_string.items()
        if name != "stack" or order
    }


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(*sys.argv[1:])
