"""Cast a module in place to bfloat16, except for what must stay in float32.

`Module.to(torch.bfloat16)` casts everything: rotary frequencies (0.73 rad of phase error at position 4095),
running statistics, metric states, and complex tables, which lose their imaginary part. `cast_module`
recognises those and leaves them; `cast_inputs` lets the cast module take the same float32 inputs as before.
"""

import re
import sys
import warnings
from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from lightning_memkit.optim.split import split
from lightning_memkit.utilities.errors import NoEffectWarning
from lightning_memkit.utilities.patching import Undo

_CAST_FROM = (torch.float32, torch.float16, torch.bfloat16)
_TABLE_NAME = re.compile(
    r"(^|_)(inv_freqs?|freqs?|frequenc(y|ies)|timescales?|positions?|rope|rotary|alibi|cos|sin)(_|$)"
)


@dataclass
class _Found:
    """The result of one walk over a module: which tensors are cast or kept, and which patterns matched."""

    parameters: dict[nn.Parameter, bool] = field(default_factory=dict)  # value: whether it is kept in float32
    buffers: list[tuple[nn.Module, str, bool]] = field(default_factory=list)
    used_patterns: set[str] = field(default_factory=set)


def cast_module(
    module: nn.Module,
    dtype: torch.dtype,
    *,
    keep_float32: Sequence[str] = (),
    low_halves: MutableMapping[nn.Parameter, Tensor] | None = None,
) -> Undo:
    """Cast parameters and buffers to ``dtype`` in place, keeping all objects; saves 2 bytes a value.

    These stay in float32 (or become float32 again):

    - whole modules: BatchNorm and InstanceNorm (their statistics and their two affine vectors; they take
      bfloat16 inputs), torchmetrics metrics, and what a transformers model names in ``_keep_in_fp32_modules``;
    - buffers that are not part of the state dict (tables computed from the configuration) and buffers named as
      frequencies or positions, such as ``inv_freq``;
    - whatever ``keep_float32`` matches.

    Complex, integer and float64 tensors are never touched. Other buffers are cast like parameters: name a
    buffer that accumulates small changes in ``keep_float32``. A tied parameter is kept if one of its names is.

    Args:
        module: cast in place; parameters stay the same objects, so optimizers and ties keep holding them.
        dtype: of the cast parameters and buffers.
        keep_float32: glob patterns of module, parameter or buffer names, or of class names:
            ``"*.router"``, ``"lm_head.weight"``, ``"LayerNorm"``.
        low_halves: filled with the int16 low half of each float32 parameter (2 bytes a value), from which
            `compensate(low_halves=...)` continues with the exact float32 weights. For bfloat16 only.

    Returns:
        The undo: casts every tensor back to its old dtype, with its current values.

    Raises:
        ValueError: a float32 parameter is sharded already: the dtype of a DTensor can't change in place.
    """
    found = _sort(module, tuple(keep_float32))
    for pattern in keep_float32:
        if pattern not in found.used_patterns:
            warnings.warn(
                f"keep_float32={pattern!r} matches no module, parameter, buffer or class name, so it keeps "
                f"nothing in float32; names found: {_some_names(module)}.",
                NoEffectWarning,
                stacklevel=2,
            )
    changed_parameters: list[tuple[nn.Parameter, torch.dtype]] = []
    changed_buffers: list[tuple[nn.Module, str, torch.dtype]] = []
    for parameter, kept in found.parameters.items():
        target = torch.float32 if kept else dtype
        if parameter.dtype == target or (kept and parameter.dtype == torch.float64):
            continue
        changed_parameters.append((parameter, parameter.dtype))
        _cast_parameter(parameter, target, low_halves)
    for owner, name, kept in found.buffers:
        buffer = owner._buffers[name]
        target = torch.float32 if kept else dtype
        if buffer is None or buffer.dtype == target:
            continue
        changed_buffers.append((owner, name, buffer.dtype))
        owner._buffers[name] = buffer.to(target)

    def undo() -> None:
        for parameter, old_dtype in changed_parameters:
            _cast_parameter(parameter, old_dtype, None)
        for owner, name, old_dtype in changed_buffers:
            buffer = owner._buffers.get(name)
            if buffer is not None:
                owner._buffers[name] = buffer.to(old_dtype)

    return undo


def cast_inputs(module: nn.Module, dtype: torch.dtype) -> Undo:
    """Let a cast module take the same inputs as before: float32 tensors are cast where weights need it.

    Forward pre-hooks cast float32 tensors to ``dtype`` at layers that own parameters of ``dtype``, and
    tensors of ``dtype`` to float32 at layers that were kept in float32. A layer is a module none of whose
    children own parameters, or one of torch's own (such as ``nn.MultiheadAttention``). Everything else,
    including targets, integers and float64, is unchanged.

    Returns:
        The undo: removes the hooks.

    Raises:
        ValueError: a layer of torch's own has parameters of both dtypes.
    """
    handles = []
    for path, layer in module.named_modules():
        own = [p for p in layer._parameters.values() if p is not None and p.dtype in (dtype, torch.float32)]
        if not own or not _is_layer(layer) or isinstance(layer, _NormBase) or _is_metric(layer):
            continue
        _refuse_two_dtypes(path, layer, dtype)
        target = dtype if any(parameter.dtype == dtype for parameter in own) else torch.float32
        source = torch.float32 if target == dtype else dtype
        handles.append(layer.register_forward_pre_hook(_InputCaster(source, target), with_kwargs=True))

    def undo() -> None:
        for handle in handles:
            handle.remove()

    return undo


def _sort(module: nn.Module, patterns: tuple[str, ...]) -> _Found:
    found = _Found()
    pending: list[tuple[str, nn.Module, bool, tuple[re.Pattern[str], ...]]] = [("", module, False, ())]
    while pending:
        path, owner, kept, named_by_model = pending.pop()
        # transformers matches these names within the model that lists them, so they apply from this path on.
        named_by_model += _names_kept_by_model(owner, path)
        kept = kept or isinstance(owner, _NormBase) or _is_metric(owner)
        kept = _matches(found, patterns, path, type(owner).__name__) or kept
        for name, parameter in owner._parameters.items():
            if parameter is None or parameter.dtype not in (*_CAST_FROM, torch.float64):
                continue
            full = _join(path, name)
            keep = _matches(found, patterns, full) or kept or any(p.search(full) for p in named_by_model)
            found.parameters[parameter] = found.parameters.get(parameter, False) or keep
        for name, buffer in owner._buffers.items():
            if buffer is None or buffer.dtype not in _CAST_FROM:
                continue
            full = _join(path, name)
            keep = _matches(found, patterns, full) or kept or any(p.search(full) for p in named_by_model)
            is_table = name in owner._non_persistent_buffers_set or _TABLE_NAME.search(name) is not None
            if keep or not is_table:  # a table keeps its dtype, unless it is kept in float32
                found.buffers.append((owner, name, keep))
        children = [
            (_join(path, name), child, kept, named_by_model) for name, child in owner.named_children()
        ]
        pending.extend(reversed(children))
    return found


def _names_kept_by_model(owner: nn.Module, path: str) -> tuple[re.Pattern[str], ...]:
    names: set[str] = set()
    for attribute in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"):
        names.update(getattr(owner, attribute, None) or ())
    prefix = re.escape(path + ".") if path else ""
    return tuple(re.compile(rf"^{prefix}(.*\.)?{re.escape(name)}(\.|$)") for name in sorted(names))


def _matches(found: _Found, patterns: tuple[str, ...], *names: str) -> bool:
    hits = {pattern for pattern in patterns for name in names if name and fnmatchcase(name, pattern)}
    found.used_patterns |= hits
    return bool(hits)


def _cast_parameter(
    parameter: nn.Parameter, dtype: torch.dtype, low_halves: MutableMapping[nn.Parameter, Tensor] | None
) -> None:
    if hasattr(parameter, "to_local"):
        raise ValueError(
            f"A parameter of shape {tuple(parameter.shape)} is sharded and {parameter.dtype}: the dtype of a "
            f"DTensor can't change in place; build the module in {dtype} before sharding it (in Lightning: "
            "build it in configure_model, which the precision plugin runs in its dtype)."
        )
    gradient, parameter.grad = parameter.grad, None
    wants_low = low_halves is not None and parameter.dtype == torch.float32 and dtype == torch.bfloat16
    if wants_low and not parameter.is_meta:
        assert low_halves is not None
        high, low_halves[parameter] = split(parameter.data)
        parameter.data = high
    else:
        parameter.data = parameter.data.to(dtype)
    if gradient is not None:
        parameter.grad = gradient.to(dtype)


def _is_layer(module: nn.Module) -> bool:
    if type(module).__module__.startswith("torch.nn."):
        return True
    return not any(next(child.parameters(), None) is not None for child in module.children())


def _refuse_two_dtypes(path: str, layer: nn.Module, dtype: torch.dtype) -> None:
    """Refuse a layer of torch's own that was only partly cast, since it computes in one dtype."""
    kept = [
        _join(path, name)
        for name, parameter in layer._parameters.items()
        if parameter is not None and parameter.dtype == torch.float32
    ]
    cast = any(parameter is not None and parameter.dtype == dtype for parameter in layer._parameters.values())
    if kept and cast and type(layer).__module__.startswith("torch.nn."):
        raise ValueError(
            f"{', '.join(kept)} would stay in float32 beside {dtype} parameters of the same "
            f"{type(layer).__name__}, and torch's layers compute in one dtype; keep the whole layer: {path!r}."
        )


def _is_metric(module: nn.Module) -> bool:
    torchmetrics = sys.modules.get("torchmetrics")  # if it is not imported, no module is a metric
    return torchmetrics is not None and isinstance(module, torchmetrics.Metric)


@dataclass(frozen=True)
class _InputCaster:
    """The hook as an object, so that it can be copied and pickled with its module."""

    source: torch.dtype
    target: torch.dtype

    def __call__(
        self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        return self._cast(args), {name: self._cast(value) for name, value in kwargs.items()}

    def _cast(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to(self.target) if value.dtype == self.source else value
        if isinstance(value, tuple) and hasattr(value, "_fields"):  # a named tuple such as PackedSequence
            return type(value)(*(self._cast(item) for item in value))
        if type(value) in (tuple, list):
            return type(value)(self._cast(item) for item in value)
        return value


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _some_names(module: nn.Module, most: int = 8) -> str:
    names = list(_all_names(module))
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _all_names(module: nn.Module) -> Iterator[str]:
    for name, _ in module.named_modules():
        if name:
            yield name
