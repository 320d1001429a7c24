"""Decide which objects in a module's attributes are recorded, and which belong to a library."""

import functools
import inspect
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from functools import lru_cache
from types import FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
from torch import Tensor, nn

MOST_ITEMS = 10_000  # of a container whose items are inspected; of a longer one only the list is kept
DEEPEST = 24  # levels of objects within objects
MOST_OBJECTS = 20_000  # plain objects, functions and containers in all

# Objects of these packages hold runs, files and connections, or refer to half the process; they manage their
# state themselves.
_FOREIGN = frozenset(
    "torch torchvision torchaudio torchdata lightning lightning_fabric lightning_utilities lightning_memkit "
    "pytorch_lightning numpy scipy pandas pyarrow PIL matplotlib transformers tokenizers datasets accelerate "
    "huggingface_hub safetensors triton wandb mlflow neptune comet_ml clearml tensorboard tensorboardX aim omegaconf "
    "hydra jsonargparse pytest _pytest".split()
)
_STANDARD = frozenset(sys.stdlib_module_names)
_HARMLESS_BASES = ("abc", "typing", "collections", "dataclasses")


def root_of(kind: Any) -> str:
    """The top-level package that a class or function comes from."""
    return str(getattr(kind, "__module__", "") or "").partition(".")[0]


def is_metric(value: object) -> bool:
    """Whether it is a torchmetrics metric, or a collection of them."""
    return any(root_of(base) == "torchmetrics" for base in type(value).__mro__)


def is_own(value: object, own_roots: frozenset[str]) -> bool:
    """Whether a plain object is inspected: of a user's class, or of a library's class if it holds tensors.

    Other objects of libraries are skipped (a logger's run, say), and so are all of torch, Lightning and
    transformers.
    """
    kind = type(value)
    if kind is SimpleNamespace:
        return True
    mine = _belongs(kind, own_roots)
    return mine is True or (mine is None and any(map(_holds_tensors, state_of(value).values())))


@lru_cache(maxsize=4096)
def _belongs(kind: type, own_roots: frozenset[str]) -> bool | None:
    """True for a user's class, False for one that is never inspected, None for an installed library's."""
    if issubclass(kind, (type, ModuleType, BaseException)):
        return False
    installed = False
    for base in kind.__mro__[:-1]:
        root = root_of(base)
        if root in own_roots:
            continue
        if root in _FOREIGN or (root in _STANDARD and root != "__main__" and root not in _HARMLESS_BASES):
            return False
        installed = installed or (root not in _STANDARD and _is_installed(root))
    return None if installed else True


@lru_cache(maxsize=1024)
def _is_installed(root: str) -> bool:
    path = getattr(sys.modules.get(root), "__file__", None) or ""
    return any(path.startswith(sysconfig.get_path(name)) for name in ("purelib", "platlib"))


def _holds_tensors(value: object) -> bool:
    if isinstance(value, (list, tuple)):
        value = next(iter(value), None)
    elif isinstance(value, Mapping):
        value = next(iter(value.values()), None)
    return isinstance(value, (Tensor, np.ndarray))


def state_of(value: object) -> dict[str, Any]:
    """A plain object's attributes, from its `__dict__` and its slots."""
    slots = {name: getattr(value, name) for name in slots_of(type(value)) if hasattr(value, name)}
    return {**getattr(value, "__dict__", {}), **slots}


@lru_cache(maxsize=4096)
def slots_of(kind: type) -> tuple[str, ...]:
    """The names of a class's slots, including its bases'."""
    names: list[str] = []
    for base in kind.__mro__:
        if root_of(base) in _STANDARD and root_of(base) != "__main__":
            continue
        slots = vars(base).get("__slots__", ())
        slots = (slots,) if isinstance(slots, str) else slots
        for name in slots:
            mangled = name.startswith("__") and not name.endswith("__")
            names.append(f"_{base.__name__.lstrip('_')}{name}" if mangled else name)
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))


def own_classes(value: object, own_roots: frozenset[str]) -> Iterator[type]:
    """The user's classes in an object's MRO; a step may set their class attributes."""
    for base in type(value).__mro__[:-1]:
        if root_of(base) in own_roots or _belongs(base, own_roots) is True:
            yield base


def class_attributes(kind: type) -> dict[str, Any]:
    """A class's attributes except functions, descriptors and Python's own."""
    return {
        name: value
        for name, value in vars(kind).items()
        if not (name.startswith("__") and name.endswith("__"))
        and name not in ("_abc_impl", "_is_protocol")
        and not callable(value)
        and not inspect.isdatadescriptor(value)
        and not hasattr(type(value), "__get__")
    }


def closure_of(value: object, own_roots: frozenset[str]) -> tuple[list[Any], list[Any]]:
    """The closure cells of a user's function, and the values that it carries: defaults, a method's object."""
    if isinstance(value, functools.partial):
        return [], [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, MethodType):
        return [], [value.__self__]
    if isinstance(value, FunctionType):
        root = root_of(value)
        if root not in own_roots and (
            root in _FOREIGN or root in _STANDARD - {"__main__"} or _is_installed(root)
        ):
            return [], []
        return list(value.__closure__ or ()), [
            *(value.__defaults__ or ()),
            *(value.__kwdefaults__ or {}).values(),
        ]
    return [], []


def roots_of(module: nn.Module) -> frozenset[str]:
    """The packages of the module's own classes: they count as the user's even if they are installed."""
    return frozenset(root_of(kind) for kind in type(module).__mro__) - _FOREIGN - (_STANDARD - {"__main__"})
