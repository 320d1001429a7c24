"""Split weights with exact states under other packages' optimizers, against float32 masters of the same classes."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch

from lightning_memkit.optim.compensation import compensate
from tests.optim.helpers import bf16_twins, set_gradients, trained_beside_masters

SHAPES = ((64, 80), (30,), (5, 7), (16, 3))  # the first is large enough for 8-bit states
SMALL_BUCKETS = 16 * 5200  # two buckets for these shapes

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "lion_pytorch.Lion": {"lr": 1e-4, "weight_decay": 0.1},
    "schedulefree.AdamWScheduleFree": {"lr": 1e-3, "weight_decay": 0.1, "warmup_steps": 10},
    "schedulefree.SGDScheduleFree": {"lr": 1e-2, "weight_decay": 0.1},
    "schedulefree.RAdamScheduleFree": {"lr": 1e-3},
    "optimi.AdamW": {"lr": 1e-3, "weight_decay": 0.1},
    "optimi.StableAdamW": {"lr": 1e-3, "weight_decay": 0.1, "triton": False},  # its own default needs a GPU
    "optimi.Lion": {"lr": 1e-4, "weight_decay": 0.1},
    "optimi.RAdam": {"lr": 1e-3},
    "optimi.Adan": {"lr": 1e-3},
    "optimi.Ranger": {"lr": 1e-3},
    "optimi.SGD": {"lr": 1e-2, "momentum": 0.9},
    "bitsandbytes.optim.AdamW": {"lr": 1e-3, "weight_decay": 0.1},
    "bitsandbytes.optim.Lion": {"lr": 1e-4},
    "bitsandbytes.optim.AdamW8bit": {"lr": 1e-3, "weight_decay": 0.1},
    "bitsandbytes.optim.Lion8bit": {"lr": 1e-4},
    "bitsandbytes.optim.SGD8bit": {"lr": 1e-2, "momentum": 0.9},
    "bitsandbytes.optim.RMSprop8bit": {"lr": 1e-3},
    "bitsandbytes.optim.AdEMAMix8bit": {"lr": 1e-3},
}
COMPILED = {  # torchao compiles its step: many seconds
    "torchao.optim._AdamW": {"lr": 1e-3, "weight_decay": 0.1},
    "torchao.optim.AdamW8bit": {"lr": 1e-3, "weight_decay": 0.1},
    "torchao.optim.AdamW4bit": {"lr": 1e-3, "weight_decay": 0.1},
    "torchao.optim.AdamWFp8": {"lr": 1e-3, "weight_decay": 0.1},
}


def optimizer_class(name: str) -> Callable[..., Any]:
    module, _, class_name = name.rpartition(".")
    pytest.importorskip(module.partition(".")[0])
    return getattr(import_module(module), class_name)


def prepared(optimizer: Any) -> Any:
    if hasattr(optimizer, "train"):  # ScheduleFree refuses a step otherwise
        optimizer.train()
    return optimizer


# torch compiles torchao's step; what the compiler imports is deprecated by torch itself.
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize(
    ("name", "options"),
    [*OPTIMIZERS.items(), *(pytest.param(*item, marks=pytest.mark.slow) for item in COMPILED.items())],
)
def test_split_with_exact_states_is_bitwise_an_fp32_master(name: str, options: dict[str, Any]) -> None:
    build = optimizer_class(name)
    trained_weights = trained_beside_masters(
        lambda groups: prepared(build(groups, **options)), SHAPES, bucket_bytes=SMALL_BUCKETS
    )
    for parameter, trained, master in trained_weights:
        assert torch.equal(trained.view(torch.int32), master.detach().view(torch.int32))
        assert not torch.equal(trained, parameter.detach().float())  # the low half holds something


def test_an_optimizer_that_combines_values_over_the_model_is_shown_all_of_it() -> None:
    prodigy = optimizer_class("prodigyopt.Prodigy")  # one step size for all; groups may not differ in theirs
    trained_weights = trained_beside_masters(
        lambda groups: prodigy([{**group, "lr": 1.0} for group in groups], weight_decay=0.1),
        SHAPES,
        bucket_bytes=SMALL_BUCKETS,
    )
    for _, trained, master in trained_weights:
        assert torch.equal(trained.view(torch.int32), master.detach().view(torch.int32))


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name.endswith("8bit")])
def test_the_8bit_classes_keep_their_8bit_states(name: str) -> None:
    parameters, low_halves = bf16_twins([torch.randn(shape) for shape in SHAPES])
    optimizer = optimizer_class(name)(parameters, **OPTIMIZERS[name])
    compensate(optimizer, mode="split", states="exact", low_halves=low_halves)
    set_gradients(parameters, seed=0)
    optimizer.step()
    assert optimizer.state[parameters[0]]["state1"].dtype == torch.uint8
    assert optimizer.state[parameters[1]]["state1"].dtype == torch.float32  # too small to be worth it
