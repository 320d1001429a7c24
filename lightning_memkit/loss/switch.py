"""Replaces a model's logits by lazy ones, so that its own loss is computed in chunks; returns an undo."""

import functools
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, get_args

import torch
from torch import Tensor, nn

from lightning_memkit.loss.backends import Backend, refuse_skipping
from lightning_memkit.loss.lazy_logits import lazy_linear
from lightning_memkit.memory.units import format_bytes
from lightning_memkit.utilities.errors import NoEffectWarning
from lightning_memkit.utilities.patching import replace_method
from lightning_memkit.utilities.tensors import is_wrapper

_MARK = "_memkit_chunked_loss"
_REMEDY = "call linear_cross_entropy(hidden, weight, labels) in training_step instead"


@dataclass(slots=True)
class _Switch:
    """State shared by the patches of one call: on or off, running forwards with labels, warnings given."""

    on: bool = True
    with_labels: int = 0
    said: set[str] = field(default_factory=set)

    def report(self, head: str, operation: str, logits: Tensor) -> None:
        """Warn once per operation that the logits of a training step were computed in full."""
        if logits.requires_grad and operation not in self.said:
            self.said.add(operation)
            warnings.warn(
                f"The logits of {head}, {format_bytes(logits.numel() * logits.element_size())}, were computed in "
                f"full: {operation} was called on them. ChunkedLoss saves them where only F.cross_entropy reads them, "
                "with class indices and no class weights; read logits under torch.no_grad(), or leave it out.",
                NoEffectWarning,
                stacklevel=2,
            )


def use_chunked_loss(
    module: nn.Module,
    *,
    heads: Sequence[str] | None = None,
    backend: Backend = "auto",
    skip_ignored: bool = True,
) -> Callable[[], None]:
    """Compute a model's own loss without its logits in memory; costs what `linear_cross_entropy` does.

    In models of the transformers package the output head returns lazy logits in each forward that gets
    `labels`; forwards without labels, including generation, don't change. The model's own loss function runs
    on the lazy logits: its shift, ignored labels, soft cap, scale, `num_items_in_batch` and auxiliary losses
    stay. The loss is computed in float32 throughout. `outputs.logits` is computed if it is read.

    Args:
        module: a model, or any module that holds one.
        heads: globs over module names (`head`, `decoder.*.out`) of `nn.Linear` layers whose output goes to
            `F.cross_entropy`, used instead of the heads of transformers models. They are lazy in every
            forward.
        backend: that of `linear_cross_entropy`.
        skip_ignored: that of `linear_cross_entropy`; False: the loss does not wait for a GPU.

    Returns:
        The undo: a function that restores the forwards.

    Raises:
        ValueError: no head was found; one is not a plain `nn.Linear`, is quantised, is patched already, or is
            compiled, alone or with the module that holds it; or an option is unknown.
    """
    refuse_options(heads, backend, skips=skip_ignored)
    models = list(_models(module)) if heads is None else []
    found = _named_heads(module, heads) if heads is not None else _heads_of(models)
    _refuse_compiled(module, found)
    for name, head in found.items():
        _refuse(name, head)
    switch = _Switch()
    options = {"backend": backend, "skip_ignored": skip_ignored}
    patched = [_patch_head(name, head, switch, heads is None, options) for name, head in found.items()]
    patched += [_patch_model(model, switch) for _, model in models]

    def undo() -> None:
        switch.on = False  # if another patch lies over ours, ours only passes calls through from now on
        for put_back in patched:
            put_back()

    return undo


def refuse_options(heads: Any, backend: Any, *, skips: bool = True) -> None:
    """Raise for options that are wrong for every model."""
    if isinstance(heads, str):
        raise ValueError(f"heads={heads!r} is one string; write heads=[{heads!r}].")
    if backend not in get_args(Backend):
        raise ValueError(f"backend={backend!r} is unknown; choose one of {get_args(Backend)}.")
    refuse_skipping(backend, skips=skips)


def _models(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Models of the transformers package that have a head and whose forward takes labels."""
    for name, inner in module.named_modules():
        is_model = any(base.__name__ == "PreTrainedModel" for base in type(inner).__mro__)
        if is_model and "labels" in inspect.signature(type(inner).forward).parameters:
            model: Any = inner
            if model.get_output_embeddings() is not None:
                yield name, model


def _heads_of(models: list[tuple[str, Any]]) -> dict[str, nn.Module]:
    found: dict[int, tuple[str, nn.Module]] = {}
    for prefix, model in models:
        names = {id(inner): name for name, inner in model.named_modules(prefix=prefix)}
        for head in _trainable_copies(model.get_output_embeddings()):
            found.setdefault(id(head), (names.get(id(head), "the output embeddings"), head))
    if not found:
        raise ValueError(
            "No transformers model with an output head and labels was found, so there is no loss to replace; name "
            f'the linear layer before F.cross_entropy, as in heads=["head"], or {_REMEDY}.'
        )
    return dict(found.values())


def _trainable_copies(head: Any) -> list[nn.Module]:
    """The head, and its copies that PEFT trains beside the original."""
    if type(head).__name__ != "ModulesToSaveWrapper":
        return [head]
    return [head.original_module, *head.modules_to_save.values()]


def _named_heads(module: nn.Module, patterns: Sequence[str]) -> dict[str, nn.Module]:
    layers = {name: inner for name, inner in module.named_modules() if isinstance(inner, nn.Linear)}
    found: dict[str, nn.Module] = {
        name: layer for name, layer in layers.items() if any(fnmatchcase(name, p) for p in patterns)
    }
    if not found:
        some = ", ".join(sorted(layers, key=lambda name: -layers[name].out_features)[:5])
        raise ValueError(
            f"No linear layer matches heads={list(patterns)!r}; the largest ones are: {some or 'none'}."
        )
    return found


def _refuse_compiled(module: nn.Module, heads: dict[str, nn.Module]) -> None:
    for name, inner in module.named_modules():
        compiled = hasattr(inner, "_orig_mod") or getattr(inner, "_compiled_call_impl", None) is not None
        held = next((head for head, layer in heads.items() if layer in set(inner.modules())), None)
        if compiled and held is not None:
            raise ValueError(
                f"{name or type(inner).__name__} is compiled and holds {held}: a compiled graph computes the logits "
                f"whatever comes after them. Compile the blocks, or the model without its head, or {_REMEDY}."
            )


def _refuse(name: str, head: nn.Module) -> None:
    if hasattr(head.__dict__.get("forward"), _MARK):
        raise ValueError(
            f"{name} has lazy logits already; call the undo of the first call before the second."
        )
    weight = getattr(head, "weight", None)
    if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward:
        raise ValueError(f"{name} is a {type(head).__name__}, no plain nn.Linear: {_REMEDY}.")
    if is_wrapper(weight) and type(weight).__name__ != "DTensor":
        raise ValueError(
            f"The weight of {name} is a {type(weight).__name__}: it can't be split into chunks; leave the head out of "
            "quantisation."
        )


def _patch_head(
    name: str, head: nn.Module, switch: _Switch, only_with_labels: bool, options: Mapping[str, Any]
) -> Callable[[], None]:
    report = functools.partial(switch.report, name)

    def forward(self: nn.Module, plain: Callable[[Tensor], Tensor], /, input: Tensor) -> Tensor:
        if not switch.on or (only_with_labels and not switch.with_labels) or torch.compiler.is_compiling():
            return plain(input)
        return lazy_linear(self, plain, input, options, report)

    return replace_method(head, "forward", forward, mark=_MARK, like=type(head).forward)


def _patch_model(model: nn.Module, switch: _Switch) -> Callable[[], None]:
    signature = inspect.signature(type(model).forward)

    def forward(self: nn.Module, plain: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        given = kwargs.get("labels") if not args else _labels_in(signature, self, args, kwargs)
        if given is None:
            return plain(*args, **kwargs)
        switch.with_labels += 1
        try:
            return plain(*args, **kwargs)
        finally:
            switch.with_labels -= 1

    return replace_method(model, "forward", forward, mark=_MARK, like=type(model).forward)


def _labels_in(signature: inspect.Signature, model: Any, args: Any, kwargs: Any) -> Any:
    return signature.bind_partial(model, *args, **kwargs).arguments.get("labels")
