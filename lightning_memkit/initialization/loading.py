"""Stream weights into a module tensor by tensor; each rank reads only its shard."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from lightning_memkit.distributed.shards import local_box, local_part
from lightning_memkit.initialization.building import settle
from lightning_memkit.initialization.materialization import give_memory
from lightning_memkit.initialization.weight_files import IndexedFiles, open_file
from lightning_memkit.initialization.weight_source import Entry, WeightSource, pieces, whole
from lightning_memkit.utilities.errors import WeightsError
from lightning_memkit.utilities.progress import ProgressBar

Renames = Mapping[str, str | None]

_INDICES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_NAMES_SHOWN = 10


@dataclass(frozen=True)
class LoadedWeights:
    """What happened to the names of a source and of a module.

    Args:
        loaded: names of the module's tensors that were loaded; for a tied tensor one of its names.
        missing: names of the module that the source lacks; their tensors are unchanged.
        unexpected: names of the source that the module lacks.
    """

    loaded: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class _ParameterPlace:
    """Where a tensor's values are: a name in the source, and other names that must have equal values."""

    stored: str
    entry: Entry
    others: list[str] = field(default_factory=list)


def load_weights(
    module: nn.Module,
    source: str | os.PathLike[str],
    *,
    strict: bool = True,
    rename: Renames | None = None,
    device: torch.device | str | None = None,
) -> LoadedWeights:
    """Stream weights from files into a module in place; uses 16 MiB of memory besides it, or one row.

    Each tensor goes directly to its parameter's device and dtype, with the values of `tensor.to(dtype)`; for
    a DTensor each rank reads only its shard. All headers, names and shapes are checked before the first value
    is written. Tied parameters need one of their names; if the source has several, their values must be
    equal. Buffers outside the state dict are unchanged.

    Args:
        module: its parameters and persistent buffers are filled; those on the meta device get memory first.
        source: a `.safetensors` file; an index of several (`model.safetensors.index.json`) or the folder with it; a
            file of `torch.save` (a state dict, or Lightning's checkpoint); a folder of torch.distributed.checkpoint.
        strict: refuse names that only the source or only the module has; False skips them and reports them in
            the result.
        rename: prefixes of the source's names and their replacements in the module: `{"": "model."}` if the
            module keeps the model as `self.model`. The longest matching prefix counts; None skips such names.
        device: where parameters on the meta device are allocated.

    Returns:
        The names that were loaded, missing and unexpected.

    Raises:
        WeightsError: a file is missing, cut short, or would run code when read; names or shapes differ; a
            parameter's dtype can't hold the values; names of one parameter have different values; or there
            are meta parameters but no device. The module is unchanged.

    Limits: a file of `torch.save` stays mapped as a whole until the end, in pages that the system can
    reclaim; a folder of torch.distributed.checkpoint is read one stored shard at a time (one rank's shard of
    one tensor).
    """
    opened = open_source(Path(source))
    with (
        torch.no_grad(),
        torch._C.DisableTorchFunction(),
    ):  # bypass contexts of default devices and of initialisers
        settle()
        targets = _targets(module)
        tables = {name for name, _ in module.named_buffers(remove_duplicate=False)} - targets.keys()
        plan, result = _match(opened.entries, targets, dict(rename or {}), tables)
        _refuse(str(source), plan, result if strict else LoadedWeights(), targets)
        read = {place.stored: local_box(targets[name]) for name, place in plan.items()}
        ties = {other: whole(opened.entries[other]) for place in plan.values() for other in place.others}
        # Tied names are compared over the whole tensor, not only this rank's shard, so verify all of it.
        opened.check(
            read | ties | {place.stored: whole(place.entry) for place in plan.values() if place.others}
        )
        _refuse_unlike_ties(str(source), opened, plan, targets)
        _ready(module, [targets[name] for name in plan], device)
        targets = _targets(module)
        parts = {name: local_part(targets[name]) for name in plan}
        total = sum(part.nbytes for part in parts.values())
        with ProgressBar(f"loading {Path(source).name}", total, "bytes") as bar:
            for name, place in plan.items():
                opened.copy_into(place.stored, local_box(targets[name]), parts[name])
                bar.advance(parts[name].nbytes)
    return result


def open_source(path: Path) -> WeightSource:
    """Read the headers of the weights at a path.

    Raises:
        WeightsError: there is nothing readable, or it is incomplete.
    """
    if path.is_file():
        return IndexedFiles(path) if path.suffix == ".json" else open_file(path)
    if not path.exists():
        raise WeightsError(
            f"{path} doesn't exist; name a .safetensors file, an index, a torch checkpoint or a folder."
        )
    for name in _INDICES:
        if (path / name).is_file():
            return IndexedFiles(path / name)
    if (path / ".metadata").is_file():
        from lightning_memkit.initialization.weight_folder import (
            DistributedFolder,  # imported on use: it loads torch.distributed.checkpoint
        )

        return DistributedFolder(path)
    files = sorted(path.glob("*.safetensors")) or sorted(path.glob("pytorch_model.bin"))
    if len(files) != 1:
        found = ", ".join(file.name for file in files) or "none"
        raise WeightsError(
            f"{path} has no index ({_INDICES[0]}), no .metadata, and not one file of weights (found: {found}); "
            "name the file or its index."
        )
    return open_file(files[0])


def _targets(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by every name they have."""
    found: dict[str, Tensor] = {}
    for path, part in module.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        kept = {n: b for n, b in part._buffers.items() if n not in part._non_persistent_buffers_set}
        for name, tensor in {**part._parameters, **kept}.items():
            if tensor is not None:
                found[prefix + name] = tensor
    return found


def _match(
    entries: Mapping[str, Entry],
    targets: Mapping[str, Tensor],
    rename: dict[str, str | None],
    tables: set[str],
) -> tuple[dict[str, _ParameterPlace], LoadedWeights]:
    """Match the module's names with the source's; ties use their first name that the source has."""
    renamed: dict[str, str] = {}
    for stored in entries:
        name = _renamed(stored, rename)
        if name in renamed:
            raise WeightsError(
                f"rename makes {name} of {renamed[name]} and of {stored}; give them different names."
            )
        if name is not None:
            renamed[name] = stored
    plan: dict[str, _ParameterPlace] = {}
    filled: dict[int, _ParameterPlace] = {}
    for name, target in targets.items():
        if name not in renamed:
            continue
        if id(target) in filled:
            filled[id(target)].others.append(renamed[name])
        else:
            plan[name] = filled[id(target)] = _ParameterPlace(
                stored=renamed[name], entry=entries[renamed[name]]
            )
    missing = [name for name, target in targets.items() if id(target) not in filled]
    unexpected = [stored for name, stored in renamed.items() if name not in targets and name not in tables]
    return plan, LoadedWeights(list(plan), missing, unexpected)


def _renamed(name: str, rename: dict[str, str | None]) -> str | None:
    fits = [start for start in rename if name.startswith(start)]
    if not fits:
        return name
    start = max(fits, key=len)
    put = rename[start]
    return None if put is None else put + name[len(start) :]


def _refuse(
    source: str,
    plan: Mapping[str, _ParameterPlace],
    result: LoadedWeights,
    targets: Mapping[str, Tensor],
) -> None:
    lines = []
    wrong = [f"{name}: {why}" for name, one in plan.items() if (why := _why_not(one.entry, targets[name]))]
    for title, names in (
        ("Missing in the source", result.missing),
        ("Unexpected, not in the module", result.unexpected),
        ("Mismatched", wrong),
    ):
        if names:
            more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
            lines.append(f"{title} ({len(names)}): {', '.join(names[:_NAMES_SHOWN])}{more}.")
    if not plan and not lines:
        lines.append("No name of the source is one of the module's.")
    if lines:
        raise WeightsError(
            f"The weights of {source} don't fit the module; nothing was loaded. {' '.join(lines)} Where names differ "
            'by their beginning, write rename={"": "model."} or {"model.": ""}; strict=False leaves missing and '
            "unexpected names; a shape that differs needs a module of the shape stored."
        )


def _refuse_unlike_ties(
    source: str, opened: WeightSource, plan: Mapping[str, _ParameterPlace], targets: Mapping[str, Tensor]
) -> None:
    for name, place in plan.items():
        for other in place.others:
            why = _why_not(opened.entries[other], targets[name])
            if why or _differ(opened, place, other, targets[name].dtype):
                raise WeightsError(
                    f"{name} is one tensor of the module under several names, and {source} holds other values as "
                    f"{other} than as {place.stored}{f' ({why})' if why else ''}; nothing was loaded. Build the "
                    f'module with a tensor for each, or skip one: rename={{"{other}": None}} takes {place.stored}.'
                )


def _differ(opened: WeightSource, place: _ParameterPlace, other: str, dtype: torch.dtype) -> bool:
    """Whether two stored tensors differ at a dtype; compares the whole, so that all ranks agree."""
    box = whole(place.entry)
    for part in pieces(box, dtype.itemsize):
        one, two = (torch.empty([b - a for a, b in part], dtype=dtype) for _ in range(2))
        opened.copy_into(place.stored, part, one)
        opened.copy_into(other, part, two)
        if not torch.equal(one.view(-1).view(torch.uint8), two.view(-1).view(torch.uint8)):  # NaN equals NaN
            return True
    return False


def _why_not(entry: Entry, target: Tensor) -> str:
    if entry.shape != tuple(target.shape):
        return f"stored {entry.shape}, in the module {tuple(target.shape)}"
    stored, own = entry.dtype, target.dtype
    same_kind = stored.is_floating_point == own.is_floating_point and stored.is_complex == own.is_complex
    fits = same_kind and (stored == own or torch.bool not in (stored, own))
    return "" if fits else f"stored {stored}, in the module {own}"


def _ready(module: nn.Module, targets: list[Tensor], device: torch.device | str | None) -> None:
    meta = [tensor for tensor in targets if tensor.is_meta]
    if meta and device is None:
        raise WeightsError(
            f"{len(meta)} tensors of the module are on the meta device and no device is named for them; write "
            'load_weights(..., device="cuda").'
        )
    if device is not None:
        give_memory(module, meta, device)
