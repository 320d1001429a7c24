"""The strategies and numbers of ranks that can be predicted, and what Lightning gets instead of them."""

import copy
from collections.abc import Mapping
from typing import Any

from lightning.pytorch.plugins.environments import ClusterEnvironment
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy, Strategy

from lightning_memkit.distributed.sharding import Sharding
from lightning_memkit.planning.choices import listed
from lightning_memkit.plugins.planning._sharded_prediction import OneOfMany
from lightning_memkit.plugins.strategies.fsdp2 import FSDP2Strategy
from lightning_memkit.plugins.strategies.zero1 import ZeRO1Strategy

_ONE_DEVICE = ("auto", "memkit")
_DDP = "ddp"
_KNOWN = (
    '"ddp", DDPStrategy(...), "memkit_zero1", "memkit_fsdp2", FSDP2Strategy(...) or '
    "ModelParallelStrategy(data_parallel_size=..., tensor_parallel_size=1)"
)


def many_ranks(options: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
    """How many ranks the Trainer's arguments ask for (0: one device, no ranks), and their replacements.

    Raises:
        ValueError: the strategy can't be predicted, or the arguments don't determine the number of ranks.
    """
    strategy = options.get("strategy", "auto")
    alone = (
        strategy in _ONE_DEVICE if isinstance(strategy, str) else isinstance(strategy, SingleDeviceStrategy)
    )
    nodes = _number("num_nodes", options.get("num_nodes", 1))
    if alone and nodes == 1 and options.get("devices", 1) in (1, "1", "auto", -1, "-1", [0], (0,)):
        return 0, {}
    if strategy == "memkit" or isinstance(strategy, SingleDeviceStrategy):
        raise ValueError(
            f"strategy={_shown(strategy)} trains on one device, and devices={options.get('devices', 1)!r} on {nodes} "
            f"node(s) are more: write devices=1, or a strategy for several: {_KNOWN}."
        )
    devices = _devices(options.get("devices", "auto"))
    ranks = devices * nodes
    changed = {
        "devices": devices,
        "num_nodes": nodes,
        "strategy": _strategy(strategy, ranks),
        "plugins": [*_plugins(options), OneOfMany(ranks)],
    }
    return ranks, changed


def _devices(devices: Any) -> int:
    if isinstance(devices, (list, tuple)) and devices:
        return len(devices)
    if devices in ("auto", -1, "-1") or devices is None:
        raise ValueError(
            f"devices={devices!r} doesn't say how many ranks there will be, and this machine need not have them: "
            "write their number, devices=8."
        )
    if isinstance(devices, str) and "," in devices:  # "0,1" lists device numbers
        return sum(1 for device in devices.split(",") if device.strip())
    return _number("devices", devices)


def _number(name: str, value: Any) -> int:
    if isinstance(value, str) and value.isdecimal():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}={value!r} is no number of at least 1; write {name}=8.")
    return value


def _plugins(options: Mapping[str, Any]) -> list[Any]:
    return [plugin for plugin in listed(options.get("plugins")) if not isinstance(plugin, ClusterEnvironment)]


def _strategy(strategy: Any, ranks: int) -> Strategy:
    if strategy == FSDP2Strategy.strategy_name:
        return FSDP2Strategy()
    if strategy == ZeRO1Strategy.strategy_name:
        return _without_processes(ZeRO1Strategy())
    if isinstance(strategy, Sharding):
        found = FSDP2Strategy()
        found.sharding = strategy
        return found
    if strategy == "auto":
        return DDPStrategy()  # Lightning's choice for several devices
    if isinstance(strategy, str) and strategy.partition("_find_unused_parameters_")[0] in _started(_DDP):
        unused = strategy.endswith("_find_unused_parameters_true")
        return DDPStrategy(find_unused_parameters=True) if unused else DDPStrategy()
    if isinstance(strategy, DDPStrategy):
        if strategy._ddp_comm_hook is not None or strategy._model_averaging_period is not None:
            raise ValueError(
                "DDPStrategy with ddp_comm_hook or model_averaging_period can't be predicted: what the hook keeps is "
                "its own. Predict without, and add the hook's bytes (PowerSGD's: two low-rank factors a weight)."
            )
        return _without_processes(_unplaced(strategy))
    if not isinstance(strategy, str) and hasattr(strategy, "shards_by"):
        if strategy.replicas != 1:
            raise ValueError(
                f"FSDP2Strategy(replicas={strategy.replicas!r}) can't be predicted; predict the ranks that share a "
                "copy: replicas=1, and as many devices as there are for each."
            )
        return _unplaced(strategy)
    if isinstance(strategy, ModelParallelStrategy):
        return _unplaced(_data_parallel(strategy, ranks))
    raise ValueError(f"strategy={_shown(strategy)} can't be predicted. For several ranks write {_KNOWN}.")


def _without_processes(strategy: Any) -> Any:
    strategy._start_method = "popen"  # Lightning then starts none: OneOfMany says that processes exist
    return strategy


def _unplaced(strategy: Any) -> Any:
    """A copy that is not connected to any devices yet."""
    strategy = copy.copy(strategy)
    strategy.cluster_environment = strategy.parallel_devices = strategy._accelerator = None
    return strategy


def _data_parallel(strategy: ModelParallelStrategy, ranks: int) -> ModelParallelStrategy:
    data, tensor = strategy._data_parallel_size, strategy._tensor_parallel_size
    if tensor != 1:
        raise ValueError(
            f"ModelParallelStrategy(data_parallel_size={data!r}, tensor_parallel_size={tensor!r}): tensor parallelism "
            '("auto" is one part a device of the node) can\'t be predicted. For FSDP2 on all ranks write '
            f"ModelParallelStrategy(data_parallel_size={ranks}, tensor_parallel_size=1)."
        )
    if data != ranks:
        raise ValueError(
            f'ModelParallelStrategy(data_parallel_size={data!r}) on {ranks} ranks ("auto" is the number of nodes): '
            f"both have to agree; write data_parallel_size={ranks}."
        )
    return strategy


def _started(name: str) -> tuple[str, ...]:
    return (name, *(f"{name}_{how}" for how in ("spawn", "fork", "notebook")))


def _shown(strategy: Any) -> str:
    return repr(strategy) if isinstance(strategy, str) else type(strategy).__name__
