"""Give parameters without memory their memory, and initialise them as their modules do."""

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor

from lightning_memkit.distributed.fsdp2 import parameter_groups, sharded_states
from lightning_memkit.distributed.shards import local_box, local_part
from lightning_memkit.initialization.building import known_by_nobody
from lightning_memkit.initialization.lending import Lending

_INITIALISERS = ("reset_parameters", "_reset_parameters")


def materialize(module: nn.Module, device: torch.device | str) -> None:
    """Allocate and initialise meta tensors; needs one float32 tensor of memory besides the module.

    Each rank allocates only its shard, with its part of the values that a single process would draw: an
    initialiser works on a whole float32 copy of one parameter at a time, and every rank draws what rank 0
    draws. Tensors with memory keep their values: load weights first, and this initialises the rest. Ties stay
    tied.

    Initialisers run in the order of the modules: `reset_parameters` (or `_reset_parameters`), and
    `initialize_weights` of transformers' models. Values differ from those of plain construction with the same
    seed, because constructors draw in another order or more often; construct in `build_on` if that matters. A
    tied parameter is initialised by the first module that has it.

    Args:
        module: sharded (`fully_shard`) or not.
        device: where memory is allocated.

    Raises:
        ValueError: a module has no initialiser that sets all its parameters and buffers; the message names it
            and the remedy.
    """
    fresh = {id(tensor): tensor for tensor in _tensors(module) if tensor.is_meta}
    if not fresh:
        return
    kept = [(buffer, buffer.clone()) for buffer in module.buffers() if not buffer.is_meta]
    give_memory(module, fresh.values(), device)
    tensors = list(fresh.values())
    with torch.no_grad():
        for tensor in tensors:
            _mark_unset(local_part(tensor))
        shards = _Shards(module, set(fresh))
        with _one_random_state(tensors, torch.device(device)), torch.device(device):
            with shards:
                _initialise(module, shards)
            shards.settle()
        for buffer, values in kept:
            buffer.copy_(values)
    _refuse_unset(module, set(fresh))


def give_memory(module: nn.Module, tensors: Iterable[Tensor], device: torch.device | str) -> None:
    """Allocate a module's meta tensors without initialising them; they stay the same objects.

    For a DTensor each rank allocates its shard. Optimizers, ties and FSDP2 keep referring to the parameters.

    Args:
        module: sharded or not.
        tensors: parameters and buffers of it.
        device: where memory is allocated.
    """
    with torch._C.DisableTorchFunction():
        bare = [tensor for tensor in tensors if tensor.is_meta]
        with known_by_nobody(bare):
            for tensor in bare:
                _swap_in(tensor, device)
    for group in parameter_groups(sharded_states(module)):
        for parameter in group.fsdp_params:
            parameter.reset_sharded_param()  # FSDP2 keeps views of the memory, padded and pinned


def _swap_in(tensor: Tensor, device: torch.device | str) -> None:
    real: Tensor = torch.empty_like(tensor.detach(), device=device)
    if isinstance(tensor, DTensor):
        real = nn.Parameter(real, requires_grad=tensor.requires_grad)
    elif isinstance(tensor, nn.Parameter):
        real = torch.Tensor._make_subclass(type(tensor), real, tensor.requires_grad)
    attributes = {
        name: value for name, value in tensor.__dict__.items() if name not in ("_local_tensor", "_spec")
    }
    vars(real).update(attributes)
    torch.utils.swap_tensors(tensor, real)


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


class _Shards(Lending):
    """Lends whole float32 copies of parameters, sharded or not; changes only those without values."""

    def __init__(self, module: nn.Module, fresh: set[int]) -> None:
        super().__init__()
        self.fresh = fresh
        owners = Counter(id(parameter) for _, parameter in module.named_parameters(remove_duplicate=False))
        self._tied = {key for key, count in owners.items() if count > 1}
        for parameter in module.parameters():
            plain = parameter.dtype == torch.float32 and not isinstance(parameter, DTensor)
            if parameter.is_floating_point() and not (plain and id(parameter) in fresh - self._tied):
                self._lent[parameter] = True

    def keep_tied(self, owner: nn.Module) -> None:
        """Fix the values of tied parameters that their first owner has initialised."""
        with torch._C.DisableTorchFunction():
            self.settle()
        self.fresh -= self._tied & {id(parameter) for parameter in owner.parameters(recurse=False)}

    def whole(self, parameter: nn.Parameter) -> Tensor:
        """The whole parameter, gathered from all ranks if it is sharded."""
        values = parameter.detach()
        values = values.full_tensor() if isinstance(values, DTensor) else values
        return values.to(torch.promote_types(values.dtype, torch.float32), copy=True)

    def put(self, parameter: nn.Parameter, copy: Tensor) -> None:
        """Keep this rank's shard of a parameter that had no values."""
        if id(parameter) in self.fresh:
            box = tuple(slice(*ends) for ends in local_box(parameter))
            local_part(parameter).copy_(copy[box])

    def on_set(self, func: Any, args: tuple) -> Any:
        """Take only the values: memory and sharding stay."""
        self.settle()
        self.put(args[0], args[1])


def _initialise(part: nn.Module, shards: _Shards) -> None:
    fresh = shards.fresh
    if not any(id(tensor) in fresh for tensor in _tensors(part)):
        return
    if callable(getattr(part, "initialize_weights", None)) and hasattr(part, "_init_weights"):
        for inner in part.modules():  # else transformers skips what it initialised on meta
            inner.__dict__.pop("_is_hf_initialized", None)
        part.initialize_weights()  # pyright: ignore[reportCallIssue]
        return
    for child in part.children():
        _initialise(child, shards)
    own = [*part.parameters(recurse=False), *part.buffers(recurse=False)]
    everything = all(id(tensor) in fresh for tensor in part.parameters())
    if any(id(tensor) in fresh for tensor in own) or everything:
        run = next(
            (getattr(part, name) for name in _INITIALISERS if callable(getattr(part, name, None))), None
        )
        if run is not None:
            run()
            shards.keep_tied(part)


@contextmanager
def _one_random_state(tensors: Iterable[Tensor], device: torch.device) -> Iterator[None]:
    """Make all ranks draw what rank 0 draws: shards must come from one whole, and replicas must be equal."""
    if not distributed.is_initialized() or not any(isinstance(tensor, DTensor) for tensor in tensors):
        yield
        return
    sources: list[Any] = [torch]
    if device.type != "cpu":
        sources.append(torch.get_device_module(device))
    own = [source.get_rng_state() for source in sources]
    shared = list(own)
    distributed.broadcast_object_list(shared, src=0)
    for source, state in zip(sources, shared, strict=True):
        source.set_rng_state(state)
    yield
    for source, mine, theirs in zip(sources, own, shared, strict=True):
        if not torch.equal(mine, theirs):
            source.set_rng_state(mine)


def _mark_unset(values: Tensor) -> None:
    if values.is_floating_point() or values.is_complex():
        values.fill_(float("nan"))
    elif values.dtype != torch.bool:
        values.fill_(torch.iinfo(values.dtype).max)


def _is_unset(values: Tensor) -> bool:
    if not values.numel():
        return False
    if values.is_complex():
        return bool(values.sum().isnan())
    if values.is_floating_point():
        return bool(values.sum(dtype=torch.float64).isnan())  # finds any NaN without a tensor of flags
    return values.dtype == torch.bool or bool(values.max() == torch.iinfo(values.dtype).max)


def _refuse_unset(module: nn.Module, fresh: set[int]) -> None:
    named = (*module.named_parameters(), *module.named_buffers())
    unset = [name for name, tensor in named if id(tensor) in fresh and _is_unset(local_part(tensor))]
    if unset:
        owners = dict.fromkeys(name.rpartition(".")[0] for name in unset)
        kinds = ", ".join(
            f"{path or 'the module'} ({type(module.get_submodule(path)).__name__})" for path in owners
        )
        raise ValueError(
            f"{', '.join(unset[:10])}{' and more' if len(unset) > 10 else ''}: no initialiser sets them; they have no "
            f"values. Give {kinds} a reset_parameters() that does, load weights that hold them, or construct on the "
            "device: build_on keeps values, build_empty keeps buffers."
        )
