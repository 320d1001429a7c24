"""Reads from a function's source whether it uses an attribute, itself or in a function that it calls."""

import ast
import inspect
import sys
import textwrap
from collections.abc import Callable
from types import FunctionType, MethodType, ModuleType
from typing import Any

_UNKNOWN: Any = object()
_DEPTH = 3  # calls that are followed


def uses_attribute(
    function: Any, attribute: str, spared: Callable[[Any], bool] = lambda _: False, depth: int = _DEPTH
) -> bool:
    """Whether a function names an attribute of an object, or calls a Python function that does.

    Modules' attributes (`torch.autograd.grad`) don't count. What can't be read or followed counts as no use.

    Args:
        function: a function or bound method.
        attribute: the attribute's name.
        spared: tells of an object that the source names (`self.probe`) whether its attribute does not count.
        depth: how many calls are followed.
    """
    owner = getattr(function, "__self__", _UNKNOWN)
    inner = inspect.unwrap(getattr(function, "__func__", function))
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inner)))
        names = _names_in(inner, tree, owner)
    except (OSError, TypeError, ValueError, SyntaxError):
        return False
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == attribute:
            base = _resolved(node.value, names)
            if not isinstance(base, ModuleType) and (base is _UNKNOWN or not spared(base)):
                return True
        elif isinstance(node, ast.Call) and depth:
            called = _resolved(node.func, names)
            if _is_followed(called) and uses_attribute(called, attribute, spared, depth - 1):
                return True
    return False


def _is_followed(called: Any) -> bool:
    # A method of torch's or Lightning's (zero_grad, to, log) does what the caller need not know.
    if isinstance(called, MethodType):
        return not called.__func__.__module__.startswith(("torch.", "lightning."))
    return isinstance(called, FunctionType)


def _names_in(function: Any, tree: ast.AST, owner: Any) -> dict[str, Any]:
    """What the names in a function stand for, as far as known before it runs."""
    variables = inspect.getclosurevars(function)
    names = {**variables.globals, **variables.nonlocals}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in sys.modules:
            for alias in node.names:
                imported = getattr(sys.modules[node.module], alias.name, _UNKNOWN)
                names[alias.asname or alias.name] = imported
    if owner is not _UNKNOWN and function.__code__.co_argcount:
        names[function.__code__.co_varnames[0]] = owner
    return names


def _resolved(node: ast.AST, names: dict[str, Any]) -> Any:
    if isinstance(node, ast.Name):
        return names.get(node.id, _UNKNOWN)
    if not isinstance(node, ast.Attribute):
        return _UNKNOWN
    base = _resolved(node.value, names)
    return _UNKNOWN if base is _UNKNOWN else _attribute_of(base, node.attr)


def _attribute_of(base: Any, name: str) -> Any:
    """An attribute of an object, without running a property."""
    own = getattr(base, "__dict__", {})
    # The last three are where a torch module keeps what it shows as attributes.
    for home in (own, *(own.get(key, {}) for key in ("_parameters", "_modules", "_buffers"))):
        if name in home:
            return home[name]
    found = inspect.getattr_static(type(base), name, _UNKNOWN)
    return MethodType(found, base) if isinstance(found, FunctionType) else _UNKNOWN
