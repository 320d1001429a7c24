"""Reset FSDP2's engine to its state between steps, after a forward or backward was interrupted.

torch has a public `reset_iter_state` since 2.13, which keeps gradients that were not reduced yet: they would
be added to those of the next backward. This reset drops them, too, and works from torch 2.10 on. It uses
private names; `why_no_reset` reports those that a torch version lacks.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

_NAMES = {
    "_state": (
        "_state_ctx",
        "_comm_ctx",
        "_training_state",
        "_is_root",
        "_modules",
        "_modules_to_run_forward",
    ),
    "_state_ctx": ("all_states", "iter_forward_root", "post_backward_final_callback_queued"),
    "_comm_ctx": ("all_gather_state", "post_forward_order"),
    "_group": (
        "fsdp_params",
        "mesh_info",
        "_training_state",
        "_sharded_state",
        "_all_gather_result",
        "_post_forward_indices",
        "_post_reduce_event",
        "_all_reduce_state",
        "_partial_reduce_output",
        "_reshard_after_forward_event",
        "_all_gather_comm",
        "_reduce_scatter_comm",
        "_all_reduce_hook",
        "_use_post_forward_mesh",
    ),
    "_param": ("to_sharded", "unsharded_accumulated_grad", "grad_offload_event"),
}


def sharded_states(module: nn.Module) -> list[Any]:
    """FSDP2's states of a module and its submodules, each once, outer ones first."""
    states: dict[int, Any] = {}
    for part in module.modules():
        if isinstance(part, FSDPModule):
            state: Any = part._get_fsdp_state()
            states.setdefault(id(state), state)
    return list(states.values())


def parameter_groups(states: list[Any]) -> list[Any]:
    """The groups of parameters that FSDP2 gathers and reduces together."""
    groups: list[Any] = []
    for state in states:
        several = getattr(state, "_fsdp_param_groups", None)  # torch 2.13; before, one a state
        groups += several if several is not None else [state._fsdp_param_group]
    return [group for group in groups if group is not None]


def sharded_parameters(module: nn.Module) -> dict[tuple[int, str], nn.Parameter]:
    """FSDP2's shards by their module's `id` and name, even while gathered parameters replace them."""
    found: dict[tuple[int, str], nn.Parameter] = {}
    for group in parameter_groups(sharded_states(module)):
        for param in group.fsdp_params:
            info = getattr(param, "_module_info", None)
            if info is None or not isinstance(getattr(param, "sharded_param", None), nn.Parameter):
                continue
            modules, names = (
                [info.module, *info.shared_modules],
                [info.param_name, *info.shared_param_names],
            )
            found |= {
                (id(owner), name): param.sharded_param for owner, name in zip(modules, names, strict=True)
            }
    return found


def gathered_parameters(module: nn.Module) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
    """The parameters that FSDP2 has gathered from shards at least once, each with its shard."""
    for group in parameter_groups(sharded_states(module)):
        for param in group.fsdp_params:
            gathered, shard = getattr(param, "_unsharded_param", None), getattr(param, "sharded_param", None)
            if isinstance(gathered, nn.Parameter) and isinstance(shard, nn.Parameter):
                yield gathered, shard


def why_no_reset(module: nn.Module) -> str:
    """Why FSDP2's engine can't be reset with this torch; empty if it can."""
    states = sharded_states(module)
    missing = set(_missing(states))
    if missing:
        return f"torch {torch.__version__} has no {', '.join(sorted(missing))} in FSDP2's engine"
    return ""


def _missing(states: list[Any]) -> Iterator[str]:
    def lacking(kind: str, item: Any) -> Iterator[str]:
        return (name for name in _NAMES[kind] if not hasattr(item, name))

    for state in states:
        yield from lacking("_state", state)
        if not hasattr(state, "_fsdp_param_groups") and not hasattr(state, "_fsdp_param_group"):
            yield "_fsdp_param_groups"
            return
        yield from lacking("_state_ctx", getattr(state, "_state_ctx", None))
    if states and hasattr(states[0], "_comm_ctx"):
        communication = type(states[0]._comm_ctx)()  # lazy_init, in the first forward, adds attributes
        communication.lazy_init(states[0]._device)
        yield from lacking("_comm_ctx", communication)
    for group in parameter_groups(states):
        yield from lacking("_group", group)
        for param in getattr(group, "fsdp_params", []):
            yield from lacking("_param", param)


def reset_fsdp(module: nn.Module) -> None:
    """Reshard all parameters and discard the interrupted step, including its unreduced gradients.

    Gradients that were already reduced stay in ``parameter.grad``; the caller drops them. This waits for
    collectives that were issued: call it on every rank, or let the peers go on to join them.
    """
    states = sharded_states(module)
    groups = parameter_groups(states)
    for group in groups:
        work = getattr(group._all_gather_result, "all_gather_work", None)
        if isinstance(work, torch.distributed.Work):
            work.wait()
    if any(group.device.type != "cpu" for group in groups):
        torch.accelerator.synchronize()  # all streams, since buffers of collectives in flight are freed below
    for state in states:
        _reset_state(state)
    for group in groups:
        _reset_group(group)
    for state in states:
        if state._is_root and _half_initialized(state):
            _uninitialize(state)


def _reset_state(state: Any) -> None:
    idle = type(state._training_state).IDLE
    state._training_state = idle
    state._modules_to_run_forward.clear()
    state._state_ctx.iter_forward_root = None
    state._state_ctx.post_backward_final_callback_queued = False
    if hasattr(state._state_ctx, "gradient_reduction_pending"):  # torch 2.15
        state._state_ctx.gradient_reduction_pending = False
        state._state_ctx.manual_backward_finalization_active = None
    communication = state._comm_ctx
    communication.all_gather_state = None
    if hasattr(communication, "active_gradient_reduction"):
        communication.active_gradient_reduction = None
    if hasattr(communication, "reduce_scatter_state"):  # torch 2.10 to 2.12 keep one, later ones a list
        communication.reduce_scatter_state = None
    for name in ("post_forward_order", "reduce_scatter_states", "_last_post_reduce_events"):
        getattr(communication, name, []).clear()


def _reset_group(group: Any) -> None:
    group._training_state = type(group._training_state).IDLE
    group._all_gather_result = None
    group._post_reduce_event = group._all_reduce_state = group._reshard_after_forward_event = None
    group._partial_reduce_output = None
    group._post_forward_indices.clear()
    if hasattr(group, "_post_backward_pending"):  # torch 2.15
        group._post_backward_pending = False
        group._partial_reduce_output_layout.clear()
        group._set_unsharded_grad_dtypes(defer_upcast=False)
    for param in group.fsdp_params:
        # One by one, since an interrupted unshard leaves some with memory although their group is "sharded".
        param.to_sharded()
        if "unsharded_accumulated_grad" in vars(param):  # torch 2.15: a property for the gradient
            param.unsharded_accumulated_grad = None
        param.grad_offload_event = None
        if hasattr(param, "_unsharded_param"):
            param._unsharded_param.grad = None
    group._sharded_state = type(group._sharded_state).SHARDED


def _half_initialized(root: Any) -> bool:
    """Whether the first forward was interrupted while the engine initialised itself."""
    groups = parameter_groups(root._state_ctx.all_states)
    return not groups or any(not hasattr(group, "_reduce_dtype") for group in groups)


def _uninitialize(root: Any) -> None:
    """Make the next forward initialise the engine anew."""
    for state in sharded_states(root._modules[0]):
        state._is_root = None
        state._state_ctx.all_states.clear()
        for group in parameter_groups([state]):
            group._module_fqn = None
