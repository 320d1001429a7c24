"""Replace methods of instances; replacements are copied with these, stack, and undo in any order."""

import functools
from collections.abc import Callable
from itertools import count
from types import MethodType
from typing import Any

import torch
from torch import nn

Undo = Callable[[], None]  # returned by functions that patch; called at most once

_BELOW, _KEY = "_memkit_below_", "_memkit_key"
_numbers = count()


def replace_method(
    module: nn.Module, name: str, run: Callable[..., Any], *, mark: str | None = None, like: Any = None
) -> Undo:
    """Replace an instance's method by `run(instance, plain, *args, **kwargs)`; `plain` is the old method.

    The class doesn't change. A deep copy of the instance uses its own replacement, and pickle finds the
    class's method.

    Args:
        module: the instance.
        name: the name of the method.
        run: called instead of the method.
        mark: an attribute that is set on the new method.
        like: a function whose signature and attributes the new method shows.

    Returns:
        The undo. If another replacement is on top, it removes the one below; if foreign code has replaced the
        method on top, that still calls `run`.
    """
    # Keep the old method on the instance, not in a closure, or a copy would call the original instance's
    # method.
    key = f"{_BELOW}{next(_numbers)}"

    # Named like the method, so that copy.deepcopy binds it to the copy and pickle finds the class's own.
    def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        below = getattr(self, key, None)
        if below is None:
            # torch 2.10's compiler can't trace MethodType; `__self__` is not needed there.
            bind = functools.partial if torch.compiler.is_compiling() else MethodType
            below = bind(getattr(type(self), name), self)
        return run(self, below, *args, **kwargs)

    if like is not None:
        functools.update_wrapper(method, like)
    method.__name__ = name
    setattr(method, _KEY, key)
    if mark is not None:
        setattr(method, mark, True)
    attributes = module.__dict__
    if name in attributes:
        attributes[key] = attributes[name]
    attributes[name] = ours = MethodType(method, module)

    def undo() -> None:
        mine = attributes.get(name) is ours
        place = name if mine else next((k for k in attributes if _is_layer(k, attributes, ours)), None)
        if place is None:
            return
        if key in attributes:
            attributes[place] = attributes.pop(key)
        else:
            del attributes[place]

    return undo


def take_off_replacements(root: nn.Module) -> None:
    """Remove all replacements of `replace_method` from a module and its submodules; meant for a copy."""
    for module in root.modules():
        attributes = module.__dict__
        for name in [name for name in attributes if not name.startswith(_BELOW)]:
            while (key := getattr(attributes.get(name), _KEY, None)) is not None:
                if key in attributes:
                    attributes[name] = attributes.pop(key)
                else:
                    del attributes[name]


def _is_layer(key: str, attributes: dict[str, Any], method: MethodType) -> bool:
    return key.startswith(_BELOW) and attributes[key] is method
