"""Finds the repeated blocks of any module: the units of activation checkpointing."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

BlockPattern = str | type[nn.Module]
_STACKS = (nn.ModuleList, nn.Sequential)
_REMEDY = 'write the names of modules or classes, such as blocks=["encoder.layers.*"], or classes'


def find_blocks(
    module: nn.Module, patterns: Sequence[BlockPattern] | None = None
) -> list[tuple[str, nn.Module]]:
    """The blocks of a module as (name, block), in the order of registration; never nested, never embeddings.

    Without patterns they are, in this order of preference:

    1. the layers that a transformers model marks for checkpointing (`GradientCheckpointingLayer`);
    2. modules of one class that repeat within a `ModuleList` or `Sequential`. The outermost ones are taken,
       unless such a module is itself little more than a stack (a stage of a CNN): then the blocks inside it.

    Args:
        module: searched below its root; the root itself is never a block.
        patterns: a class, or a glob matched against module names (`"encoder.layers.*"`), class names
            (`"Llama*Layer"`) and full class paths, base classes included. The outermost match wins.

    Raises:
        ValueError: the patterns are one string or class instead of a list.
    """
    if patterns is not None:
        refuse_single_pattern(patterns)
        return _outermost(module, lambda name, child: _matches(name, child, patterns))
    marked = _outermost(module, lambda _, child: _marked_by_transformers(child))
    return marked or list(_repeated(module))


def refuse_single_pattern(patterns: Any) -> None:
    """Raise if a pattern is not in a list (a string would be read letter by letter), or is not a pattern.

    Raises:
        ValueError: `patterns` is a string or a class, or contains something else.
    """
    if isinstance(patterns, (str, type)):
        shown = repr(patterns) if isinstance(patterns, str) else patterns.__name__
        raise ValueError(f"blocks={shown} is one pattern; blocks is a list of them: write blocks=[{shown}].")
    if not isinstance(patterns, Iterable):
        raise ValueError(f"blocks={patterns!r} is no list: {_REMEDY}.")
    for pattern in patterns:
        if not isinstance(pattern, (str, type)):
            raise ValueError(f"blocks holds {pattern!r}, which is no pattern: {_REMEDY}.")


def describe_blocks(blocks: Sequence[tuple[str, nn.Module]]) -> str:
    """Classes, counts and first names for messages: `12 LlamaDecoderLayer (model.layers.0, ...)`."""
    if not blocks:
        return "none"
    counts = Counter(type(block).__name__ for _, block in blocks)
    first = {type(block).__name__: name for name, block in reversed(blocks)}
    return ", ".join(f"{count} {name} ({first[name]}, ...)" for name, count in counts.items())


def has_router(block: nn.Module) -> bool:
    """Whether a block routes tokens to experts, judged by the names of its classes."""
    return any(
        part in type(module).__name__
        for module in block.modules()
        for part in ("Router", "Moe", "MoE", "Experts")
    )


def _outermost(module: nn.Module, is_block) -> list[tuple[str, nn.Module]]:
    found: list[tuple[str, nn.Module]] = []
    for name, child in module.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer, _ in found)
        if name and not inside and not isinstance(child, nn.Embedding) and is_block(name, child):
            found.append((name, child))
    return found


def _matches(name: str, module: nn.Module, patterns: Sequence[BlockPattern]) -> bool:
    classes = [cls for cls in type(module).__mro__ if issubclass(cls, nn.Module) and cls is not nn.Module]
    texts = [
        name,
        *(text for cls in classes for text in (cls.__name__, f"{cls.__module__}.{cls.__qualname__}")),
    ]
    return any(
        any(fnmatchcase(text, pattern) for text in texts)
        if isinstance(pattern, str)
        else isinstance(module, pattern)
        for pattern in patterns
    )


def _marked_by_transformers(module: nn.Module) -> bool:
    # By name, to avoid importing transformers for models that don't use it.
    return any(
        cls.__name__ == "GradientCheckpointingLayer" and cls.__module__.startswith("transformers.")
        for cls in type(module).__mro__
    )


def _repeated(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    classes = {
        cls for stack in module.modules() if isinstance(stack, _STACKS) for cls in _repeated_classes(stack)
    }
    seen: set[nn.Module] = set()

    def walk(parent: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
        for key, child in parent.named_children():
            if child in seen:
                continue
            seen.add(child)
            if isinstance(parent, _STACKS) and type(child) in classes and not _is_stage(child):
                yield prefix + key, child
            else:
                yield from walk(child, f"{prefix}{key}.")

    yield from walk(module, "")


def _repeated_classes(stack: nn.Module) -> set[type[nn.Module]]:
    counts = Counter(type(child) for child in stack.children() if _can_be_block(child))
    return {cls for cls, count in counts.items() if count > 1}


def _can_be_block(module: nn.Module) -> bool:
    # A single layer saves little but its input, which checkpointing would keep as well.
    is_leaf = next(module.children(), None) is None
    return not is_leaf and next(module.parameters(), None) is not None


def _is_stage(module: nn.Module) -> bool:
    """Whether more than half of a module's parameters are in one stack of blocks directly below it."""
    total = _parameters(module)
    stacks = [child for child in (module, *module.children()) if isinstance(child, _STACKS)]
    return any(_repeated_classes(stack) and 2 * _parameters(stack) > total for stack in stacks)


def _parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
