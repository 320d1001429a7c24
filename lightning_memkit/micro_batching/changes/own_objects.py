"""Decide which objects in a module's attributes are recorded, and which belong to a library."""

import functools
import re
import sys
import sysconfig
from collections import deque
from collections.abc import Iterator, Mapping
from enum import Enum
from functools import lru_cache
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

MOST_ITEMS = 10_000  # of a container whose items are inspected; of a longer one only the list is kept
DEEPEST = 24  # levels of objects within objects
MOST_OBJECTS = 20_000  # plain objects, functions and containers in all

# Libraries, whose objects are recorded only if all that they hold is plain (see `is_own`).
_FOREIGN = frozenset(
    "torch torchvision torchaudio torchdata lightning lightning_fabric lightning_utilities lightning_memkit "
    "pytorch_lightning numpy scipy pandas pyarrow PIL matplotlib transformers tokenizers datasets accelerate "
    "huggingface_hub safetensors triton wandb mlflow neptune comet_ml clearml tensorboard tensorboardX aim omegaconf "
    "hydra jsonargparse pytest _pytest".split()
)
# Objects of these packages hold runs, files, processes and connections, or refer to half the process; they manage
# their state themselves. Neither they nor a user's subclasses of them are ever touched.
_UNTOUCHED = frozenset(
    "lightning_memkit pandas pyarrow PIL matplotlib datasets triton wandb mlflow neptune comet_ml clearml tensorboard "
    "tensorboardX aim pytest _pytest logging threading multiprocessing concurrent asyncio socket socketserver ssl "
    "subprocess selectors http urllib sqlite3 ctypes _ctypes io _io tempfile unittest importlib inspect ast".split()
)
_UNTOUCHED_PARTS = re.compile(
    r"(lightning\.pytorch|lightning\.fabric|pytorch_lightning|lightning_fabric)"
    r"\.(trainer|loggers|strategies|loops|accelerators|plugins|profilers|fabric|cli)\b"
    r"|torch\.(distributed|cuda|multiprocessing|futures|profiler|autograd|jit|fx|export|_dynamo|_inductor)\b"
    r"|torch\.utils\.(hooks|tensorboard|_)|torch\.utils\.data\.dataloader\._"
)
# Classes of libraries whose objects are recorded whatever they hold: they keep state in plain attributes.
_RECORDED = re.compile(
    r"(argparse|queue|configparser|_thread|weakref|_weakrefset|sched|string|statistics|types\.SimpleNamespace"
    r"|collections|torch\.optim|torch\.quasirandom|torch\.distributions|torch\.amp|torch\.utils\.data)\."
)
_STANDARD = frozenset(sys.stdlib_module_names)
_HARMLESS_BASES = ("abc", "typing", "collections", "dataclasses")
_PLAIN = (int, float, str, bytes, complex, type(None), torch.dtype, torch.device)


def root_of(kind: Any) -> str:
    """The top-level package that a class or function comes from."""
    return str(getattr(kind, "__module__", "") or "").partition(".")[0]


def is_metric(value: object) -> bool:
    """Whether it is a torchmetrics metric, or a collection of them."""
    return any(root_of(base) == "torchmetrics" for base in type(value).__mro__)


def is_memkits_hook(value: object) -> bool:
    """Whether it is a callable of memkit's own, which never holds state of the user's."""
    return root_of(type(value)) == "lightning_memkit"


def is_own(value: object, own_roots: frozenset[str]) -> bool:
    """Whether an object's attributes are recorded and put back.

    They are for objects of the user's classes, also if these inherit from a library's; for classes that keep state
    in plain attributes (queues, namespaces, optimizers, schedulers, loaders); and for a library's object that holds
    nothing but numbers, strings and containers of these, or tensors. Never for loggers, the Trainer, data frames,
    threads and processes.
    """
    belongs = _belongs(type(value), own_roots)
    if belongs is not None:
        return belongs
    state = state_of(value)
    if not state:
        return False
    if root_of(type(value)) not in (_FOREIGN | _STANDARD) and any(map(_holds_tensors, state.values())):
        return True
    return all(map(_is_plain, state.values()))


@lru_cache(maxsize=4096)
def _belongs(kind: type, own_roots: frozenset[str]) -> bool | None:
    """True for a class that is recorded, False for one that never is, None where it depends on the object."""
    if issubclass(kind, (type, ModuleType, BaseException)):
        return False
    if kind.__module__ == "builtins":
        return False
    for base in kind.__mro__[:-1]:
        if root_of(base) in own_roots:
            continue
        name = f"{base.__module__}.{base.__qualname__}"
        if root_of(base) in _UNTOUCHED or _UNTOUCHED_PARTS.match(name):
            return False
    if is_users(kind, own_roots) or _RECORDED.match(f"{kind.__module__}.{kind.__qualname__}."):
        return True
    return None


def is_users(kind: type, own_roots: frozenset[str]) -> bool:
    """Whether a class is the user's: neither Python's nor of an installed library."""
    root = root_of(kind)
    if root in own_roots or root == "__main__":
        return True
    return not (root in _FOREIGN or root in _STANDARD or _is_installed(root))


def _is_plain(value: object, depth: int = 0) -> bool:
    """Whether a value is a number, a string or a short container of these."""
    if isinstance(value, _PLAIN):
        return True
    if depth > 3 or not isinstance(value, (list, tuple, set, frozenset, dict, deque)) or len(value) > 64:
        return False
    items = value.values() if isinstance(value, dict) else value
    return all(_is_plain(item, depth + 1) for item in items)


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


def own_classes(kind: type, own_roots: frozenset[str]) -> Iterator[type]:
    """The user's classes in a class's MRO; a step may set their class attributes."""
    for base in kind.__mro__[:-1]:
        if is_users(base, own_roots) and not issubclass(base, Enum):
            yield base


def functions_with_state(kind: type) -> dict[str, Any]:
    """A class's functions that hold a cache or attributes. Variables of its surroundings are no state of the class."""
    found = {}
    for name, value in vars(kind).items():
        function = getattr(value, "__func__", value)  # of a static or class method
        is_function = isinstance(function, FunctionType)
        if (is_function and function.__dict__.keys() - {"__wrapped__"}) or hasattr(function, "cache_info"):
            found[name] = function
    return found


def objects_of_class(kind: type, own_roots: frozenset[str]) -> dict[str, Any]:
    """The user's objects that a class holds as code: descriptors and callables, which may keep state of their own."""
    return {
        name: value
        for name, value in vars(kind).items()
        if is_users(type(value), own_roots)
        and not isinstance(value, type)
        and (callable(value) or hasattr(type(value), "__get__"))
    }


def is_users_function(value: object, own_roots: frozenset[str]) -> bool:
    """Whether it is a function of the user's, whose closure, defaults and attributes a step may change."""
    if not isinstance(value, FunctionType):
        return False
    root = root_of(value)
    return root in own_roots or not (
        root in _FOREIGN or root in _STANDARD - {"__main__"} or _is_installed(root)
    )


def closure_of(value: object, own_roots: frozenset[str]) -> tuple[list[Any], list[Any]]:
    """The closure cells of a user's function, and the values that it carries: defaults, a method's object."""
    if isinstance(value, functools.partial):
        return [], [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, MethodType):
        return [], [value.__self__]
    if isinstance(value, FunctionType) and is_users_function(value, own_roots):
        return list(value.__closure__ or ()), [
            *(value.__defaults__ or ()),
            *(value.__kwdefaults__ or {}).values(),
        ]
    return [], []


def roots_of(module: nn.Module) -> frozenset[str]:
    """The packages of the module's own classes: they count as the user's even if they are installed."""
    return frozenset(root_of(kind) for kind in type(module).__mro__) - _FOREIGN - (_STANDARD - {"__main__"})
