"""Drift of a weight of 1 under 10,000 equal small updates, against a float32 master given the same updates.

The update is torch's own SGD with a gradient of -1, so that it is the same float32 number, the learning rate,
in every row and step. `split_vs_master_*` is the largest difference of any weight from the master's.
`error_*` is the difference of how far a weight has come, as a share of how far the master has come: 1 where it
has not moved. All figures are of the mean of 256 weights; `spread` is their standard deviation, which is what
rounding at random costs: the weights' own in the stochastic rows, in memkit's kahan that of Kahan's rest, in
split24 that of the 24th bit.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import SGD, Optimizer

from benchmarks.__main__ import main_of
from benchmarks._flashoptim import FlashOptim
from benchmarks.harness import Options, Report
from lightning_memkit.optim.compensation import compensate, compensation_of

STEPS = 10_000
WEIGHTS = 256
UPDATES = {"1e4": 1e-4, "1e5": 1e-5, "1e6": 1e-6}

Build = Callable[[list[Parameter], float], Any]


def run(options: Options) -> Report:
    """Take 10,000 steps of each update with every optimizer; the same with `--quick`, under two minutes."""
    torch.manual_seed(options.seed)  # what peers draw their noise from
    figures: dict[str, float | int | bool] = {}
    rows: list[dict[str, object]] = []
    for name, update in UPDATES.items():
        master = final_weights(lambda p, lr: SGD(p, lr=lr), update, torch.float32)
        rows.append(_row("torch SGD, float32 master", update, master, master))
        for key, (label, build) in candidates(options.seed).items():
            weights = final_weights(build, update, torch.bfloat16)
            row = _row(label, update, weights, master)
            rows.append(row)
            figures[f"error_{key}_{name}"] = abs(float(_error(weights, master)))
            if key == "split":
                figures[f"split_vs_master_{name}"] = float((weights - master).abs().max())
    notes = (
        "weight: the mean of the weights in float32, with their compensation where there is one",
        "optimi rounds Kahan's rest to nearest, which stalls or overshoots by turns",
        "torchao has Adam-like optimizers only: with betas (0, 0), eps 0 and no decay its AdamW subtracts the "
        "learning rate times the sign of the gradient, the same update",
    )
    return Report("drift", figures, rows, notes=notes)


def candidates(seed: int) -> dict[str, tuple[str, Build]]:
    """Every optimizer over bfloat16 weights, by the key of its figures."""
    return {
        "split": ("memkit split", partial(_memkit, "split", seed)),
        "split24": ("memkit split24", partial(_memkit, "split24", seed)),
        "kahan": ("memkit kahan", partial(_memkit, "kahan", seed)),
        "stochastic": ("memkit stochastic", partial(_memkit, "stochastic", seed)),
        "none": ("memkit none", partial(_memkit, "none", seed)),
        "plain": ("torch SGD on bf16", lambda parameters, lr: SGD(parameters, lr=lr)),
        "optimi": ("optimi SGD, Kahan", _optimi),
        "torchao": ("torchao AdamW, stochastic rounding", _torchao),
        "flashoptim": ("FlashOptim's SGD, from its paper", _flashoptim),
    }


def final_weights(build: Build, update: float, dtype: torch.dtype) -> Tensor:
    """The weights after all steps, in float32 and with their compensation."""
    parameter = Parameter(torch.ones(WEIGHTS, dtype=dtype))
    optimizer = build([parameter], update)
    gradient = parameter.grad = torch.empty_like(parameter)
    for _ in range(STEPS):
        gradient.fill_(-1)  # anew: optimi uses it as scratch memory
        optimizer.step()
    handle = compensation_of(optimizer)
    if handle is not None:
        return next(iter(handle.float32_weights()))[1]
    if isinstance(optimizer, FlashOptim):
        return optimizer.float32_weight(parameter)
    rest = optimizer.state[parameter].get("kahan_comp")
    weights = parameter.detach().float()
    return weights if rest is None else weights + rest.float()


def _row(label: str, update: float, weights: Tensor, master: Tensor) -> dict[str, object]:
    return {
        "what": label,
        "update": f"{update:.0e}",
        "weight": round(float(weights.double().mean()), 7),
        "error": f"{_error(weights, master):+.2%}",
        "spread": f"{(weights.double().std() / (master.double() - 1).mean()):.2%}",
    }


def _error(weights: Tensor, master: Tensor) -> Tensor:
    moved = master.double().mean() - 1
    return (weights.double().mean() - 1 - moved) / moved


def _memkit(mode: Any, seed: int, parameters: list[Parameter], lr: float) -> Optimizer:
    optimizer = SGD(parameters, lr=lr)
    compensate(optimizer, mode=mode, seed=seed)
    return optimizer


def _flashoptim(parameters: list[Parameter], lr: float) -> Optimizer:
    return FlashOptim(parameters, lr=lr, betas=None, weight_decay=0.0)


def _optimi(parameters: list[Parameter], lr: float) -> Any:
    from optimi import SGD as OptimiSGD

    return OptimiSGD(parameters, lr=lr, kahan_sum=True)


def _torchao(parameters: list[Parameter], lr: float) -> Any:
    from torchao.optim import _AdamW

    return _AdamW(parameters, lr=lr, betas=(0.0, 0.0), eps=0.0, weight_decay=0.0, bf16_stochastic_round=True)


if __name__ == "__main__":
    raise SystemExit(main_of(__file__))
