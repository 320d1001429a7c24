"""How long a step's operators take: computed from a device's rates, or measured on a device of this machine.

An accelerator computes while its host launches more work, so a step takes as long as the slower of the two.
"""

import math
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_memkit.memory.clocks import DeviceClocks, Took, launched
from lightning_memkit.memory.device_faults import refuse_if_dead
from lightning_memkit.planning.tape_times import ASSUMED, tape_seconds
from lightning_memkit.prediction.devices import Device
from lightning_memkit.prediction.work import OperatorWork, TensorShape, Work

# Fractions of the data sheet's peaks that large matrix products and copies reach.
_OF_PEAK_FLOPS, _OF_PEAK_BYTES = 0.6, 0.8
# Host time to launch an operator, including autograd's overhead; also the least time of any kernel.
_LAUNCH_SECONDS = 5e-6
HOST_BYTES_PER_SECOND = 40e9  # of the host's memory, that a rank's optimizer step on the CPU gets: assumed
_MOST_BYTES = 1 << 28  # the most bytes of operands in a measurement
_RUNS, _ENOUGH_SECONDS = (3, 20), 0.03  # least and most runs; short ones are disturbed by other processes
_CPU = torch.device("cpu")
_REMEDY = "plan for the card by its name (`device: h200`), whose times follow from its data sheet"


class Times(Protocol):
    """Tells how long an operator takes."""

    def seconds(self, operator: OperatorWork) -> float:
        """Device seconds of one run."""
        ...

    def host_seconds(self, operator: OperatorWork) -> float:
        """Host seconds to launch one run; 0 if the host is the device."""
        ...


def part_seconds(work: Work, times: Times) -> float:
    """The time of a micro-batch's forward and backward.

    Device, host and communication overlap, so the slowest determines it.
    """
    sent = {operator: count for operator, count in work.part.items() if operator.communicates}
    own = {operator: count for operator, count in work.part.items() if operator not in sent}
    return max(_sum(own, times.seconds), _sum(sent, times.seconds), _sum(work.part, times.host_seconds))


def step_seconds(work: Work, times: Times) -> float:
    """The optimizer's step: the slower of device and host."""
    return max(_sum(work.step, times.seconds), _sum(work.step, times.host_seconds))


def moved_bytes(work: Work) -> float:
    """What an optimizer's step reads and writes."""
    return sum(count * operator.moved_bytes for operator, count in work.step.items())


def _sum(operators: Mapping[OperatorWork, float], seconds: Callable[[OperatorWork], float]) -> float:
    # An exact sum: equal work takes equal time, in whatever order its operators were counted.
    return math.fsum(count * seconds(operator) for operator, count in operators.items())


def reduced(gradient_bytes: int) -> OperatorWork:
    """DDP's all-reduce of gradients: each byte is sent about twice, whatever the number of ranks."""
    return OperatorWork("c10d.allreduce_.default", (), (), 0, 2 * gradient_bytes, is_16_bit=False)


class TimesByRates:
    """The roofline model: an operator takes the longer of computing and moving, at least its launch.

    The host launches an operator in 5 microseconds; operators of a tape take 26 more to record and 18 to
    recompute.

    Source: Williams et al., Roofline, CACM 2009. On an H200 the launch of a small kernel took 7.8
    microseconds of the host and 2.2 of the device; times of steps are not yet verified on a GPU.

    Args:
        device: gives the rates; 60 % of its peak FLOPs and 80 % of its peak bandwidths are assumed.
        nodes: over which ranks are spread: the network is slower than the links within a node.
    """

    def __init__(self, device: Device, nodes: int = 1) -> None:
        self._flops = {
            True: device.flops_16 * _OF_PEAK_FLOPS,
            False: device.flops_32 * _OF_PEAK_FLOPS,
        }
        self._bytes = device.bytes_per_second * _OF_PEAK_BYTES
        link = device.link_bytes_per_second if nodes == 1 else device.network_bytes_per_second
        self._sent = link * _OF_PEAK_BYTES

    def seconds(self, operator: OperatorWork) -> float:
        """Device seconds of one run."""
        if operator.is_python:
            return 0.0
        if operator.communicates:
            return max(operator.moved_bytes / self._sent, _LAUNCH_SECONDS)
        computes = operator.flops / self._flops[operator.is_16_bit]
        return max(computes, operator.moved_bytes / self._bytes, _LAUNCH_SECONDS)

    def host_seconds(self, operator: OperatorWork) -> float:
        """Host seconds to launch one run."""
        return ASSUMED.get(operator.name, _LAUNCH_SECONDS)


class TimesHere:
    """Times each operator on a device of this machine, on data of its shapes; some milliseconds a shape.

    Operators with operands of more than 256 MiB, and those that can't run alone (because their values matter,
    or another device is needed), are not run: they are assumed to reach the rates of a large product and a
    large copy. They run in this process: one that ends the device's context is named (`DeviceFaultError`), since
    estimates of all that follows would hide that nothing runs any more. Last run on a GPU:
    2026-11-27, H200, torch 2.11; its times are not yet verified there.

    Args:
        device: where operators run.
        others: times what this can't measure: communication.
    """

    def __init__(self, device: str = "cpu", others: Times | None = None) -> None:
        self._device = torch.device(device)
        self._others = others
        self._known: dict[OperatorWork, Took] = {}
        self._clocks: DeviceClocks | None = None

    def seconds(self, operator: OperatorWork) -> float:
        """Device seconds of one run."""
        return self._took(operator).device

    def host_seconds(self, operator: OperatorWork) -> float:
        """Host seconds to launch one run; 0 if the host is the device."""
        return self._took(operator).host

    def _took(self, operator: OperatorWork) -> Took:
        if operator not in self._known:
            self._known[operator] = self._measured(operator)
        return self._known[operator]

    def _measured(self, operator: OperatorWork) -> Took:
        on_host = self._device.type == "cpu"
        if operator.is_python:  # host time only: a GPU with queued work does not wait for it
            taping = tape_seconds()[operator.name]
            return Took(taping, 0.0) if on_host else Took(0.0, taping)
        launch = 0.0 if on_host else _LAUNCH_SECONDS
        if operator.communicates and self._others is not None:
            return Took(self._others.seconds(operator), launch)
        function = None if operator.communicates else _function(operator.name)
        if function is None or operator.moved_bytes > _MOST_BYTES:
            return Took(self._estimated(operator), launch)
        try:
            with torch.no_grad(), _same_random_state(self._device):
                if self._device.type not in DeviceClocks.DEVICES:
                    return Took(_timed(function, operator, self._device), launch)
                self._clocks = self._clocks or DeviceClocks(self._device)
                return launched(_call(function, operator, self._device), clocks=self._clocks)
        except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError) as error:
            shapes = ", ".join(str(item.shape) for item in operator.args if isinstance(item, TensorShape))
            refuse_if_dead(self._device, error, f"Timing {operator.name} on ({shapes})", _REMEDY)
            return Took(self._estimated(operator), launch)

    def _estimated(self, operator: OperatorWork) -> float:
        flops, moved = _rates_here(self._device, operator.is_16_bit)
        return max(operator.flops / flops, operator.moved_bytes / moved)


def _call(function: Any, operator: OperatorWork, device: torch.device) -> Callable[[], object]:
    with device:
        args, kwargs = _real(operator.args), {name: _real(value) for name, value in operator.kwargs}
    return lambda: function(*args, **kwargs)


def _same_random_state(device: torch.device) -> AbstractContextManager[None]:
    if device.type == "cpu":
        return torch.random.fork_rng(devices=[])
    current = torch.get_device_module(device).current_device()
    return torch.random.fork_rng(devices=[current], device_type=device.type)


def _timed(function: Any, operator: OperatorWork, device: torch.device = _CPU) -> float:
    with device:
        args, kwargs = _real(operator.args), {name: _real(value) for name, value in operator.kwargs}
    function(*args, **kwargs)
    best, began = float("inf"), time.perf_counter()
    least, most = _RUNS
    for run in range(most):
        _wait_for(device)
        before = time.perf_counter()
        function(*args, **kwargs)
        _wait_for(device)
        now = time.perf_counter()
        best = min(best, now - before)
        if run + 1 >= least and now - began > _ENOUGH_SECONDS:
            break
    return best


def _wait_for(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).synchronize()


def _function(name: str) -> Any:
    """The operator of a name such as `aten.mm.default`; None for memkit's own kernels."""
    namespace, _, rest = name.partition(".")
    packet, _, overload = rest.partition(".")
    found = getattr(getattr(torch.ops, namespace), packet, None) if namespace != "memkit" else None
    return None if found is None else getattr(found, overload, None)


def _real(item: Any) -> Any:
    if isinstance(item, TensorShape):
        return _tensor(item)
    return tuple(_real(value) for value in item) if isinstance(item, tuple) else item


def _tensor(shape: TensorShape) -> Tensor:
    """A tensor with values on which no kernel is slow."""
    tensor = torch.empty_strided(shape.shape, shape.stride, dtype=shape.dtype)
    if 0 in shape.stride and tensor.numel():  # expanded: write only the distinct elements
        ones = [slice(0, 1) if stride == 0 else slice(None) for stride in shape.stride]
        tensor[tuple(ones)].fill_(_value(shape.dtype))
    else:
        tensor.fill_(_value(shape.dtype))
    return tensor


def _value(dtype: torch.dtype) -> float:
    return 0.5 if dtype.is_floating_point else 1 if dtype is torch.bool else 0


@lru_cache(maxsize=4)
def _rates_here(device: torch.device, is_16_bit: bool) -> tuple[float, float]:
    """FLOPs and bytes a second of a large product and a large copy."""
    dtype = torch.bfloat16 if is_16_bit else torch.float32
    square = TensorShape((1024, 1024), (1024, 1), dtype)
    long = TensorShape((1 << 24,), (1,), torch.float32)
    product = OperatorWork("aten.mm.default", (square, square), (), 2 * 1024**3, 0, is_16_bit)
    copy = OperatorWork("aten.copy_.default", (long, long), (), 0, 8 << 24, is_16_bit=False)
    return (
        product.flops / _timed(torch.ops.aten.mm.default, product, device),
        copy.moved_bytes / _timed(torch.ops.aten.copy_.default, copy, device),
    )
