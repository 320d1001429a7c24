"""Save and load single-file checkpoints."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_memkit.checkpoints import streamed
from lightning_memkit.checkpoints.atomic import new_file, recover
from lightning_memkit.checkpoints.documents import Document, encode
from lightning_memkit.checkpoints.pickles import read_torch_file


def save(state: Any, path: str | Path, *, checksums: bool = True) -> None:
    """Write a nested state as one safetensors file, atomically and without a second copy in memory.

    Weights (below ``state["state_dict"]``) keep their own names, for other readers of safetensors. Tied
    weights are written once. Tensors that are different views of the same memory are written separately.

    Args:
        state: dicts, lists, tuples and sets of tensors and primitives, nested.
        path: the path of the file; an existing one is replaced when the new one is on disk.
        checksums: whether to write the checksums that `load` verifies.

    Raises:
        CheckpointError: something is neither a tensor nor a primitive; nothing is written then.
        OSError: the file can't be written.
    """
    write_document(encode(state), Path(path), checksums=checksums)


def write_document(document: Document, path: Path, *, checksums: bool = True) -> None:
    """Like `save`, for a document that `encode` returned."""
    with new_file(path) as file:
        streamed.write(document, file, with_checksums=checksums)


def load(path: str | Path, map_location: Any = None, *, checked: bool = True) -> Any:
    """The state in a file that `save` or `torch.save` wrote; nothing in it is executed.

    A file that `save` wrote is read completely once to verify its checksums. CPU tensors are a private memory
    map of the file: they take no memory of their own until they are written to.

    Args:
        path: the path of the file.
        map_location: where to put tensors, as for `torch.load`; a function leaves them on the CPU.
        checked: False skips the checksums.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: the file is damaged, or needs code to be read.
    """
    path = Path(path)
    recover(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist, or is no file; give the path of a checkpoint.")
    if not streamed.is_safetensors(path):
        return read_torch_file(path, "cpu" if map_location is None else map_location)
    state = streamed.read(path, checked=checked)
    device = map_location.get("cpu") if isinstance(map_location, dict) else map_location
    return state if device is None or callable(device) else _moved(state, torch.device(device), {})


def snapshot(document: Document) -> Document:
    """The document with its tensors copied to host memory, for a writer that runs while training goes on."""
    copies = {name: _host_copy(tensor) for name, tensor in document.tensors.items()}
    return Document(document.structure, copies, document.aliases)


def _host_copy(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.clone() if tensor.device.type == "cpu" else tensor.cpu()


def _moved(value: Any, device: torch.device, done: dict[int, Tensor]) -> Any:
    """The state on a device; a tensor that occurs twice stays one tensor."""
    if isinstance(value, Tensor):
        if id(value) not in done:
            done[id(value)] = value.to(device)
        return done[id(value)]
    if isinstance(value, dict):
        for key, item in value.items():
            value[key] = _moved(item, device, done)
        return value
    if type(value) in (list, tuple):
        return type(value)(_moved(item, device, done) for item in value)
    return value
