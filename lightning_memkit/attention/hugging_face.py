"""Packed attention in models of the transformers package: registers an attention function and a mask function.

The mask function returns a small object with the documents in place of the model's masks; the layers pass it
on to the attention function. It passes through activation checkpointing like any argument.
"""

import inspect
import sys
import warnings
from collections.abc import Callable
from contextvars import ContextVar, Token
from functools import partial
from typing import Any

from torch import Tensor, nn

from lightning_memkit.attention.door import Backend, packed_attention
from lightning_memkit.attention.packed_mask import Forward, PackedMask
from lightning_memkit.attention.pattern import pattern_of
from lightning_memkit.attention.positions import (
    PlacesInRows,
    bounds_of,
    cache_given,
    first_position,
    positions_of,
    restarts,
)
from lightning_memkit.attention.refusals import MAYBE_OWN_MASK, OWN_ROWS, PackingRefusedError
from lightning_memkit.attention.verified import refuse_what_differs
from lightning_memkit.utilities.patching import Undo

NAME = "memkit_packed"
_running: ContextVar[Forward | None] = ContextVar("memkit_packed_forward", default=None)


def is_transformers_model(module: nn.Module) -> bool:
    """Whether a module is a model of the transformers package; imports nothing."""
    modeling = sys.modules.get("transformers.modeling_utils")
    return modeling is not None and isinstance(module, modeling.PreTrainedModel)


def switch(model: Any, backend: Backend) -> Undo:
    """Make a model attend with `packed_attention` wherever its forward is given documents; returns the undo.

    Raises:
        ValueError: its attention can't be replaced, it takes no positions, or a small copy of it computes
            packed documents differently from single ones.
    """
    _check(model)
    _register()
    refuse_what_differs(model, lambda twin: _switched(twin, "loop"))
    return _switched(model, backend)


def refusal_of(model: Any) -> PackingRefusedError | None:
    """Why `switch` would refuse a model, or None; the model stays as it is. Costs what `switch` does."""
    try:
        _check(model)
        _register()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that nothing is known
            refuse_what_differs(model, lambda twin: _switched(twin, "loop"))
    except PackingRefusedError as error:
        return error
    except ValueError:  # with a message of several sentences, or the model's own
        return PackingRefusedError(f"use_packed_attention refuses {type(model).__name__}")
    return None


def _switched(model: Any, backend: Backend) -> Undo:
    models = [module for module in model.modules() if is_transformers_model(module)]
    configs = {id(each.config): each.config for each in models}
    before = [(config, config._attn_implementation) for config in configs.values()]
    handles = []
    for each in models:
        hooks = _Hooks(each, backend)
        handles.append(each.register_forward_pre_hook(hooks.enter, with_kwargs=True))
        handles.append(each.register_forward_hook(hooks.leave, always_call=True))
    for config, implementation in before:
        # The public setter also writes into every sub-config, which the undo would not find again.
        config._attn_implementation_internal = _name_over(implementation)

    def undo() -> None:
        for config, implementation in before:
            config._attn_implementation_internal = implementation
        for handle in handles:
            handle.remove()

    return undo


def _check(model: Any) -> None:
    name = type(model).__name__
    if str(model.config._attn_implementation).startswith(NAME):
        raise ValueError(f"{name} uses packed attention already; call the undo before you ask for it again.")
    if getattr(model.config, "is_encoder_decoder", False):
        raise PackingRefusedError(
            f"{name} is an encoder with a decoder",
            ": queries face another sequence's keys, which packed attention does not know.",
        )
    if not model._can_set_attn_implementation():
        raise PackingRefusedError(
            f"{name} computes its attention without transformers' interface",
            ", so it can't be replaced.",
            f"{OWN_ROWS} Or call packed_attention in the model's own code.",
        )
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise PackingRefusedError(
            f"{name}.forward takes no position_ids",
            ": positions would run on from one document into the next.",
        )
    if (carrier := _carries_tokens_on(model)) is not None:
        raise PackingRefusedError(
            f"{name} has {carrier}",
            ", where tokens of one document reach the next outside of attention.",
        )


def _carries_tokens_on(model: Any) -> str | None:
    """What mixes tokens besides attention (states, linear attention, convolutions); None if nothing does."""
    named: Any = getattr(model.config, "layer_types", None) or ()
    kinds = {str(kind) for kind in named if "linear" in str(kind) or "recurrent" in str(kind)}
    if kinds:
        return f"layers of the type {', '.join(sorted(kinds))}"
    for path, module in model.named_modules():
        # A depthwise convolution before a state. An audio encoder's is excluded: the model around it takes no
        # tokens.
        if isinstance(module, nn.Conv1d) and 1 < module.groups == module.in_channels:
            owners = [model.get_submodule(path[:end]) for end in range(len(path)) if path[end] == "."]
            around = next((each for each in reversed(owners) if is_transformers_model(each)), model)
            if "input_ids" in inspect.signature(around.forward).parameters:
                return f"{path} ({type(module).__name__})"
    return None


def _name_over(implementation: str | None) -> str:
    return f"{NAME}_eager" if implementation == "eager" else NAME


def _register() -> None:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS as MASKS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as FUNCTIONS

    for original in ("sdpa", "eager"):
        MASKS.register(_name_over(original), partial(_mask, MASKS[original]))
        function = None if original == "eager" else FUNCTIONS[original]
        FUNCTIONS.register(_name_over(original), partial(_attention, function))


class _Hooks:
    """Takes documents out of a forward's arguments, and keeps them while it runs."""

    def __init__(self, model: Any, backend: Backend) -> None:
        self._backend: Backend = backend
        self._parameters = list(inspect.signature(model.forward).parameters)
        self._first_position = first_position(model)
        self._places = PlacesInRows(model)
        self._tokens: list[Token[Forward | None] | None] = []

    def enter(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        """Before the forward: get documents from `cu_seqlens`, transformers' own `cu_seq_lens_q`, or positions."""
        self._tokens.append(None)  # for `leave`, which is called even after an error here
        given: dict[str, Any] = {**dict(zip(self._parameters, args, strict=False)), **kwargs}
        bounds: Any = given.get("cu_seqlens", given.get("cu_seq_lens_q"))
        if bounds is None and (_running.get() is not None or not restarts(given)):
            return None
        self._refuse(given)
        tokens = given.get("input_ids")
        rows, length = (given["inputs_embeds"] if tokens is None else tokens).shape[:2]
        positions: Any = given.get("position_ids")
        if positions is None:
            positions = positions_of(bounds, rows, length)
        if bounds is None:
            bounds = bounds_of(positions, rows, length)
        if self._first_position and int(positions.min()) < self._first_position:
            positions = positions + self._first_position
        longest = given.get("max_seqlen", given.get("max_length_q"))
        self._places.check(type(model).__name__, length, longest)
        forward = Forward(cu_seqlens=bounds, max_seqlen=longest, backend=self._backend)
        changed = {key: value for key, value in kwargs.items() if key not in ("cu_seqlens", "max_seqlen")}
        changed["position_ids"] = positions
        if "use_cache" in self._parameters:
            changed["use_cache"] = False
        self._tokens[-1] = _running.set(forward)
        kept = [value for name, value in zip(self._parameters, args, strict=False) if name not in changed]
        if len(kept) < len(args):  # removing one shifted the arguments after it: pass all by name
            return (), {**dict(zip(self._parameters, args, strict=False)), **changed}
        return args, changed

    def leave(self, model: nn.Module, args: Any, output: Any) -> None:
        """After the forward, even a failed one."""
        if self._tokens and (token := self._tokens.pop()) is not None:
            _running.reset(token)

    def _refuse(self, given: dict[str, Any]) -> None:
        if given.get("attention_mask") is not None:
            raise ValueError(
                "attention_mask was passed beside packed documents; leave it out: cu_seqlens tells where they end, "
                "and padding is a segment of its own."
            )
        if cache_given(given) or given.get("use_cache"):
            raise ValueError(
                "use_cache=True (or a cache) was passed beside packed documents; a cache takes a row for one "
                "document. Leave it out; in training nothing reads it."
            )


def _mask(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The mask function: a `PackedMask` for packed documents, otherwise the model's own mask."""
    forward = _running.get()
    if forward is None:
        return original(*args, **kwargs)
    asked: dict[str, Any] = {
        key: kwargs.get(key) for key in ("batch_size", "q_length", "mask_function", "local_size")
    }
    found = pattern_of(forward.cu_seqlens, **asked)
    if found is None:
        raise PackingRefusedError(
            "Within a document this model's attention is neither causal nor in both directions",
            ", whole or in a sliding window; packed attention knows nothing else.",
            MAYBE_OWN_MASK,
        )
    return PackedMask(forward=forward, causal=found[0], window=found[1])


def _attention(
    original: Callable[..., Any] | None,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Any]:
    """The attention function; returns [batch, tokens, heads, head_dim], and no weights."""
    if not isinstance(attention_mask, PackedMask):
        if _running.get() is not None:
            raise PackingRefusedError(
                f"{type(module).__name__} gets a mask that its model makes by itself",
                "; documents would see each other.",
                MAYBE_OWN_MASK,
            )
        # The model's own attention, for evaluation with padding and for generation.
        function = original or sys.modules[type(module).__module__].eager_attention_forward
        if softcap is not None:
            kwargs["softcap"] = softcap
        return function(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)
    for name in ("s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise PackingRefusedError(
                f"{type(module).__name__} adds {name} to its scores",
                ", which packed attention does not know.",
                MAYBE_OWN_MASK,
            )
    out = packed_attention(
        query,
        key,
        value,
        attention_mask.forward.cu_seqlens,
        max_seqlen=attention_mask.forward.max_seqlen,
        causal=attention_mask.causal,
        scale=scaling,
        window=attention_mask.window,
        dropout_p=dropout,
        softcap=softcap,
        backend=attention_mask.forward.backend,
    )
    return out.transpose(1, 2).contiguous(), None
