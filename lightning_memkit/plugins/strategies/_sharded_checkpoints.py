"""How `FSDP2Strategy` saves and loads: a folder with every rank's shard, or one file with everything."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.strategies.model_parallel import (
    _load_raw_module_state,
    _rekey_optimizer_state_if_needed,
)
from torch import distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from lightning_memkit.checkpoints import sharded
from lightning_memkit.checkpoints.background import host_copies
from lightning_memkit.checkpoints.errors import CheckpointError
from lightning_memkit.checkpoints.places import folder_of_ranks
from lightning_memkit.checkpoints.saveable import refuse_unsaveable
from lightning_memkit.distributed.own_group import own_group
from lightning_memkit.distributed.timeouts import waiting_for_ranks
from lightning_memkit.optim.modes import LOW_STATES
from lightning_memkit.plugins.strategies.checkpoint_io import StreamingCheckpointIO

_OPTIMIZER = "optimizer_"  # Lightning's name for an optimizer's states, followed by its number


def save(checkpoint: dict[str, Any], path: Path, checkpoint_io: Any) -> None:
    """Write a checkpoint as a folder, on all ranks; Lightning's ModelParallelStrategy can resume it, too.

    With an asynchronous StreamingCheckpointIO each rank copies its shards to host memory, and a thread writes
    them.
    """
    path = folder_of_ranks(path)
    shares = {"state_dict": checkpoint.pop("state_dict")}
    states = checkpoint.pop("optimizer_states", [])
    shares |= {f"{_OPTIMIZER}{number}": state for number, state in enumerate(states)}
    if not is_asynchronous(checkpoint_io):
        sharded.save_sharded(shares, checkpoint, path)
        return
    wait_on_all_ranks(checkpoint_io)  # at most one copy at a time; raises the previous write's error
    refuse_unsaveable(shares, checkpoint)
    copies, rest, group = host_copies(shares), host_copies(checkpoint), own_group()
    path.parent.mkdir(parents=True, exist_ok=True)  # ModelCheckpoint links to it at once
    checkpoint_io.write_later(lambda: sharded.save_sharded(copies, rest, path, group), path)


def is_asynchronous(checkpoint_io: Any) -> bool:
    """Whether a thread writes checkpoints."""
    return isinstance(checkpoint_io, StreamingCheckpointIO) and checkpoint_io.asynchronous


def wait_on_all_ranks(checkpoint_io: StreamingCheckpointIO) -> None:
    """Return when the threads of all ranks have written; if one failed, all ranks raise.

    Otherwise a rank whose thread has failed would stop, and the others would wait for it in the next save.
    """
    failure: Exception | None = None
    try:
        checkpoint_io.wait()
    except Exception as error:
        failure = error
    told: list[str | None] = []
    if dist.is_initialized():
        told = [None] * dist.get_world_size()
        reason = None if failure is None else f"{type(failure).__name__}: {failure}"
        group = own_group()
        with waiting_for_ranks("the last checkpoint was finished", group):
            dist.all_gather_object(told, reason, group=group)
    if failure is not None:
        raise failure
    for rank, reason in enumerate(told):
        if reason is not None:
            raise CheckpointError(f"Rank {rank} could not write a checkpoint: {reason}")


def load_folder(
    path: Path, module: nn.Module, optimizers: Sequence[Optimizer], weights_only: bool | None, strict: bool
) -> dict[str, Any]:
    """Load a folder into the ranks' shards, whatever number of ranks wrote it; returns the unsharded rest."""
    weights = {"state_dict": get_model_state_dict(module)}
    sharded.load_sharded(weights, path)
    module.load_state_dict(weights["state_dict"], strict=strict)
    for number, optimizer in enumerate(optimizers):  # one at a time: states are copied to the CPU
        name = f"{_OPTIMIZER}{number}"
        _forget_rests(optimizer)
        state = {name: get_optimizer_state_dict(module, optimizer)}
        sharded.load_sharded(state, path)
        options = StateDictOptions(cpu_offload=True)
        set_optimizer_state_dict(module, optimizer, optim_state_dict=state[name], options=options)
    if weights_only is False:  # an explicit False means that the caller trusts the file
        sharded.check_rest(path)
        return torch.load(path / sharded.REST, map_location="cpu", weights_only=False)
    return sharded.load_rest(path)


def _forget_rests(optimizer: Optimizer) -> None:
    """Drop low halves of weights to be replaced: torch would take them for complete optimizer states."""
    for parameter, state in list(optimizer.state.items()):
        if state and set(state) <= set(LOW_STATES):
            del optimizer.state[parameter]


def load_file(
    checkpoint: dict[str, Any], module: nn.Module, optimizers: Sequence[Optimizer], strict: bool
) -> dict[str, Any]:
    """Give each rank its shard of a loaded whole checkpoint; returns the unsharded rest."""
    _load_raw_module_state(checkpoint.pop("state_dict"), module, strict=strict)
    states = checkpoint.get("optimizer_states", [])
    if len(states) < len(optimizers):
        raise CheckpointError(
            f"The checkpoint has the states of {len(states)} optimizer(s) and the module has {len(optimizers)}; it "
            "was saved with save_weights_only=True, or by another module. Load its weights alone with "
            "load_from_checkpoint."
        )
    options = StateDictOptions(broadcast_from_rank0=True, full_state_dict=True, strict=strict)
    for optimizer, state in zip(optimizers, states, strict=False):
        _forget_rests(optimizer)
        if state["state"]:
            state = _rekey_optimizer_state_if_needed(state, module)
        set_optimizer_state_dict(module, optimizer, optim_state_dict=state, options=options)
    return checkpoint
