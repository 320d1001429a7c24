"""Python's time for the operators that a tape records and recomputes, measured on this machine."""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_memkit.activations.planned import run_recorded
from lightning_memkit.activations.tape import RECORDING_SECONDS, RUNNING_AGAIN_SECONDS
from lightning_memkit.prediction.contained import NO_AUTOGRAD_IN_FORKS, contained
from lightning_memkit.prediction.work import MADE_AGAIN, RECORDED

# Of the processor named in activations/tape.py.
ASSUMED = {RECORDED: RECORDING_SECONDS, MADE_AGAIN: RUNNING_AGAIN_SECONDS}
_CHAIN, _CHAIN_RUNS = 32, 10
_measured: dict[str, float] = {}  # the answer of this process, once there is one


def tape_seconds() -> dict[str, float]:
    """Host seconds to record an operator, and to recompute one.

    Measured once a process, in a fork: on a machine with a GPU, a backward in this process would end predictions in
    forks. Where they have ended already (a second fit, a notebook), it is measured here; where neither works, these
    are `ASSUMED`. Never 0: a plan that takes tapes to be free checkpoints selectively where the host is the bound.
    """
    if not _measured:
        try:
            _measured.update(_apart())
        except RuntimeError:  # PredictionError is one
            return ASSUMED
    return _measured


def _apart() -> dict[str, float]:
    try:
        return contained(_tape_seconds)
    except AttributeError:  # no forks on this system, so none to end
        return _tape_seconds()
    except RuntimeError as error:
        if NO_AUTOGRAD_IN_FORKS not in str(error):
            raise
        return _tape_seconds()


def _tape_seconds() -> dict[str, float]:
    with torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.enable_grad():
        plain, recorded, again = (
            _best(lambda keep=keep: _chain(keep)) for keep in (None, lambda _: True, lambda _: False)
        )
        small = _small()
        alone = _best(lambda: torch.ops.aten.tanh.default(small))
    return {
        RECORDED: max(0.0, recorded - plain) / _CHAIN,
        MADE_AGAIN: max(0.0, (again - recorded) / _CHAIN - alone),
    }


def _small() -> Tensor:
    return torch.full((8, 8), 0.5, device="cpu", dtype=torch.float32)


def _chain(keep: Callable[[Any], bool] | None) -> None:
    """Forward and backward of a chain of small operators."""
    x = _small().requires_grad_()

    def forward(y: Tensor) -> Tensor:
        for _ in range(_CHAIN):
            y = y.tanh()
        return y

    out = forward(x) if keep is None else run_recorded(forward, (x,), {}, keep)
    out.sum().backward()


def _best(run: Callable[[], object]) -> float:
    seconds = []
    for _ in range(_CHAIN_RUNS):
        before = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - before)
    return min(seconds)
