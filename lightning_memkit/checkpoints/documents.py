"""Convert a nested state to a JSON document with named tensors, and back; neither can contain code.

Anything but tensors and primitives is refused with its path when saving: otherwise the need for code would be
noticed only when the checkpoint is loaded.
"""

import base64
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from lightning_memkit.checkpoints.errors import CheckpointError
from lightning_memkit.utilities.tensors import is_wrapper

RESERVED = ("__metadata__", "memkit/structure", "memkit/checksums")  # names that the file format reserves
_WEIGHTS = "state_dict"  # its tensors keep the names that the module gives them
_SEQUENCES: dict[Any, str] = {tuple: "tuple", set: "set", torch.Size: "Size"}
_MAPPINGS: dict[Any, str] = {dict: "dict", OrderedDict: "OrderedDict", Counter: "Counter"}
_TEXTS: dict[str, Callable[[str], Any]] = {
    "float": float,
    "complex": complex,
    "bytes": lambda text: base64.b64decode(text),
    "dtype": lambda name: dtype_of(name),
    "device": torch.device,
}
_REMEDIES = {
    "Path": "save str(path)",
    "ndarray": "save torch.from_numpy(array)",
    "Namespace": "save vars(namespace)",
    "function": "leave it out, or save its name",
    "Module": "leave it out: self.save_hyperparameters(ignore=[...])",
    "generic": "save value.item()",
    "Enum": "save member.value",
    "Mapping": "save dict(value)",
}


@dataclass
class Document:
    """A state in the form in which it is written."""

    structure: Any = None
    """JSON; tensors are named in it."""
    tensors: dict[str, Tensor] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    """Names of tied weights that are not written, and under which they are."""


def encode(state: Any) -> Document:
    """A document of a state; it shares the state's tensors without copies.

    Weights (below ``"state_dict"``) keep their own names, other tensors are named by their path with slashes.
    A tensor that occurs twice is stored once.

    Raises:
        CheckpointError: something is neither a tensor nor a primitive.
    """
    encoder = _DocumentEncoder()
    encoder.document.structure = encoder.encode(state, ())
    return encoder.document


def decode(structure: Any, tensor_of: Callable[[str], Tensor]) -> Any:
    """The state of a document; a tensor that occurred twice is again one tensor.

    Args:
        structure: the document's structure.
        tensor_of: returns a tensor by its name.
    """
    return _Decoder(tensor_of).decode(structure)


class _DocumentEncoder:
    def __init__(self) -> None:
        self.document = Document()
        self._names: dict[Any, str] = {}  # names of tensors by their memory
        self._within: set[int] = set()

    def encode(self, value: Any, path: tuple[Any, ...]) -> Any:
        kind = type(value)
        if value is None or kind in (bool, int, str):
            return value
        if kind is float:
            return value if math.isfinite(value) else {"float": repr(value)}
        if isinstance(value, Tensor):
            return self._tensor(value, path)
        if kind is list or kind in _SEQUENCES or kind in _MAPPINGS:
            return self._container(value, path)
        if kind is bytes:
            return {"bytes": base64.b64encode(value).decode()}
        if kind is complex:
            return {"complex": repr(value)}
        if kind is torch.dtype:
            return {"dtype": str(value).removeprefix("torch.")}
        if kind is torch.device:
            return {"device": str(value)}
        raise _refused(value, path)

    def _container(self, value: Any, path: tuple[Any, ...]) -> Any:
        if id(value) in self._within:
            raise CheckpointError(f"The state contains itself at {_place(path)}; save it without that entry.")
        self._within.add(id(value))
        try:
            if isinstance(value, Mapping):
                return self._mapping(value, path)
            items = [self.encode(item, (*path, number)) for number, item in enumerate(value)]
            return items if type(value) is list else {_SEQUENCES[type(value)]: items}
        finally:
            self._within.remove(id(value))

    def _mapping(self, value: Mapping[Any, Any], path: tuple[Any, ...]) -> Any:
        items: Any = {key: self.encode(item, (*path, key)) for key, item in value.items()}
        if not all(type(key) is str for key in items):
            items = [
                [self.encode(key, (*path, f"key {key!r}")), item] for key, item in items.items()
            ]  # JSON's keys are strings
        node = {_MAPPINGS[type(value)]: items}
        versions = getattr(value, "_metadata", None)  # modules' versions, attached by torch
        if versions is not None:
            node["versions"] = self.encode(versions, (*path, "_metadata"))
        return node

    def _tensor(self, value: Tensor, path: tuple[Any, ...]) -> Any:
        refuse_tensor(value, path)
        if is_wrapper(value):
            return self._wrapper(value, path)
        value = value.detach()
        plain = value if type(value) is Tensor else value.as_subclass(Tensor)
        wanted = _name(path)
        if wanted in self.document.tensors or wanted in RESERVED:
            wanted = next(
                f"{wanted}~{n}" for n in range(2, 10**9) if f"{wanted}~{n}" not in self.document.tensors
            )
        name = self._names.setdefault(_memory(plain, wanted), wanted)
        if name == wanted:
            self.document.tensors[name] = plain
        else:
            self.document.aliases[wanted] = name
        return {"tensor": name}

    def _wrapper(self, value: Any, path: tuple[Any, ...]) -> Any:
        """Encode a tensor that contains others (torchao's 8-bit states), if its class counts as safe."""
        kind = type(value)
        if _safe_class(_class_name(kind)) is not kind:
            raise CheckpointError(
                f"{_place(path)} is a {_class_name(kind)}, which is not registered as safe to load; register it with "
                "torch.serialization.add_safe_globals, or save plain tensors."
            )
        names, context = value.__tensor_flatten__()
        inner = {name: self.encode(getattr(value, name), (*path, name)) for name in names}
        outer = [list(value.shape), list(value.stride())]
        return {
            "wrapper": _class_name(kind),
            "inner": inner,
            "context": self.encode(context, path),
            "outer": outer,
        }


class _Decoder:
    def __init__(self, tensor_of: Callable[[str], Tensor]) -> None:
        self._tensor_of = tensor_of
        self._tensors: dict[str, Tensor] = {}

    def decode(self, node: Any) -> Any:
        if isinstance(node, list):
            return [self.decode(item) for item in node]
        if not isinstance(node, dict):
            return node
        kind, content = next(iter(node.items()), ("", None))  # further entries describe the first
        if kind == "tensor":
            return self._tensor(str(content))
        if kind in _TEXTS:
            return _TEXTS[kind](str(content))
        for sequence, name in _SEQUENCES.items():
            if kind == name:
                return sequence(self.decode(content))
        for mapping, name in _MAPPINGS.items():
            if kind == name:
                return self._mapping(mapping, content, node.get("versions"))
        if kind == "wrapper":
            return self._wrapper(node)
        raise CheckpointError(
            f"The checkpoint holds a {kind!r}, which this version does not know; it was written by another one."
        )

    def _tensor(self, name: str) -> Tensor:
        if name not in self._tensors:
            self._tensors[name] = self._tensor_of(name)
        return self._tensors[name]

    def _mapping(self, kind: Any, content: Any, versions: Any) -> Any:
        pairs = (
            content.items()
            if isinstance(content, dict)
            else ((self.decode(key), item) for key, item in content)
        )
        value = kind({key: self.decode(item) for key, item in pairs})
        if versions is not None:
            value._metadata = self.decode(versions)
        return value

    def _wrapper(self, node: dict[str, Any]) -> Any:
        kind = _safe_class(node["wrapper"])
        if kind is None:
            package = node["wrapper"].partition(".")[0]
            raise CheckpointError(
                f"The checkpoint holds a {node['wrapper']}, which nobody has called safe to load; import {package} "
                "first, or register the class with torch.serialization.add_safe_globals."
            )
        inner = {name: self.decode(item) for name, item in node["inner"].items()}
        shape, stride = node["outer"]
        return kind.__tensor_unflatten__(
            inner, self.decode(node["context"]), torch.Size(shape), tuple(stride)
        )


def refuse_tensor(value: Tensor, path: tuple[Any, ...]) -> None:
    """Raise CheckpointError for a tensor that is not plain memory, with its place."""
    what, remedy = "", ""
    if hasattr(value, "to_local"):
        what = "a shard of a tensor"
        remedy = (
            "gather it with full_tensor(), or save sharded (FSDP2Strategy's save_distributed_checkpoint=True)"
        )
    elif is_lazy(value):
        what, remedy = "not initialized yet", "run the module once before saving"
    elif value.device.type == "meta":
        what, remedy = "a tensor without data (on the meta device)", "materialise the module before saving"
    elif value.is_nested and value.layout == torch.strided:
        what, remedy = "a nested tensor", "save its components: list(tensor.unbind())"
    elif value.layout != torch.strided or value.is_quantized:
        what, remedy = f"a tensor of layout {value.layout}, dtype {value.dtype}", "save its dense parts"
    if what:
        raise CheckpointError(f"{_place(path)} is {what} and can't be saved; {remedy}.")


def _refused(value: Any, path: tuple[Any, ...]) -> CheckpointError:
    bases = {base.__name__ for base in type(value).__mro__}
    bases |= {"Path"} & {"Path" for base in bases if base == "PurePath"}
    remedy = next((text for name, text in _REMEDIES.items() if name in bases), "")
    if not remedy and isinstance(value, (int, float, str, Mapping)):
        base = next(base for base in (int, float, str, Mapping) if isinstance(value, base))
        remedy = f"save {'dict' if base is Mapping else base.__name__}(value)"
    shown = repr(value)
    shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
    return CheckpointError(
        f"{_place(path)} is {shown}, of type {_class_name(type(value))}: a checkpoint holds tensors and primitives "
        f"only, so that it loads without running code; {remedy or 'save what it consists of, or leave it out'}."
    )


def _place(path: tuple[Any, ...]) -> str:
    return "checkpoint" + "".join(f"[{key!r}]" for key in path)


def _name(path: tuple[Any, ...]) -> str:
    if len(path) == 2 and path[0] == _WEIGHTS:
        return str(path[1])
    return "/".join(map(str, path)) or "tensor"


def _memory(value: Tensor, name: str) -> Any:
    """A key that two references to the same tensor share; empty tensors have no address and never share."""
    if not value.numel():
        return name
    place = (value.device, value.untyped_storage().data_ptr(), value.storage_offset())
    return (*place, value.dtype, value.shape, value.stride(), value.is_conj(), value.is_neg())


def dtype_of(name: str) -> torch.dtype:
    """The dtype with a name without `torch.`; raises CheckpointError if there is none."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(
            f"The checkpoint names the dtype {name!r}, which torch {torch.__version__} lacks."
        )
    return dtype


def _class_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _safe_class(name: str) -> Any:
    """The class of this name that was registered as safe; nothing is imported for it."""
    registered = (
        entry[0] if isinstance(entry, tuple) else entry for entry in torch.serialization.get_safe_globals()
    )
    return next((kind for kind in registered if isinstance(kind, type) and _class_name(kind) == name), None)
