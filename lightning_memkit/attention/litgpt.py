"""Packed attention in litgpt's models; no import of litgpt, its models are known by what they have.

litgpt hands no arguments from its forward to its attention. So documents go along with the tensor that enters a block:
there activation checkpointing finds them again, too.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_memkit.attention.documents import Documents
from lightning_memkit.attention.door import Backend, packed_attention

Undo = Callable[[], None]

_ATTRIBUTE = "_memkit_documents"


def is_litgpt_model(module: nn.Module) -> bool:
    """Whether it has blocks with attention as litgpt's GPT has."""
    transformer = getattr(module, "transformer", None)
    if not isinstance(transformer, nn.ModuleDict) or "h" not in transformer:
        return False
    blocks: Any = transformer["h"]
    return all(hasattr(getattr(block, "attn", None), "scaled_dot_product_attention") for block in blocks)


def switch(model: Any, backend: Backend) -> Undo:
    """Let a model attend with `packed_attention` where its forward is told ``cu_seqlens``; returns the undo.

    Its rotary positions run on from document to document, which changes nothing but rounding: they are relative.

    Raises:
        ValueError: its attention is latent, or it is switched already.
    """
    blocks = list(model.transformer["h"])
    for block in blocks:
        if getattr(block.attn.config, "latent_attention", None):
            raise ValueError(
                f"{type(model).__name__} has latent attention, which this switch does not know; call packed_attention "
                'in it, or give each document its own row: packing="none".'
            )
        if "scaled_dot_product_attention" in vars(block.attn):
            raise ValueError(
                f"{type(model).__name__} uses packed attention already; call the undo before you ask for it again."
            )
    carrier = _Carrier(backend)
    handles = [
        model.register_forward_pre_hook(carrier.enter, with_kwargs=True),
        model.register_forward_hook(carrier.leave, always_call=True),
    ]
    for block in blocks:
        handles.append(block.register_forward_pre_hook(carrier.enter_block))
        handles.append(block.register_forward_hook(carrier.leave_block, always_call=True))
        block.attn.scaled_dot_product_attention = partial(
            carrier.attend, block.attn, block.attn.scaled_dot_product_attention
        )

    def undo() -> None:
        for handle in handles:
            handle.remove()
        for block in blocks:
            del block.attn.scaled_dot_product_attention

    return undo


class _Carrier:
    """Brings documents from the forward's arguments to every block's attention, also when it is run again."""

    def __init__(self, backend: Backend) -> None:
        self._backend: Backend = backend
        self._given: Documents | None = None  # of the forward that runs
        self._here: Documents | None = None  # of the block that runs
        self._has_packed = False

    def enter(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        """Before the forward."""
        kwargs = dict(kwargs)
        bounds, longest = kwargs.pop("cu_seqlens", None), kwargs.pop("max_seqlen", None)
        self._given = None if bounds is None else Documents(cu_seqlens=bounds, max_seqlen=longest)
        self._has_packed |= bounds is not None
        if bounds is not None and (len(args) > 1 or kwargs.get("input_pos") is not None):
            raise ValueError(
                "input_pos was passed beside cu_seqlens; it reads the key-value cache, which takes a row for one "
                "document. Leave it out."
            )
        return args, kwargs

    def leave(self, model: nn.Module, args: Any, output: Any) -> None:
        """After the forward, also a failed one."""
        self._given = None

    def enter_block(self, block: nn.Module, args: Any) -> None:
        """Before a block: in a forward mark its input, in a recomputation find the mark."""
        entering: Tensor = args[0]
        if torch._C._current_graph_task_id() == -1:
            setattr(entering, _ATTRIBUTE, self._given)
        elif not hasattr(entering, _ATTRIBUTE) and self._has_packed:
            raise ValueError(
                "A litgpt block is computed again without its documents. Checkpoint block by block, and with "
                "use_reentrant=False."
            )
        self._here = getattr(entering, _ATTRIBUTE, None)

    def leave_block(self, block: nn.Module, args: Any, output: Any) -> None:
        """After a block, also a failed one."""
        self._here = None

    def attend(
        self,
        attention: Any,
        original: Callable[..., Tensor],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None = None,
    ) -> Tensor:
        """In the place of its scaled_dot_product_attention: [batch, tokens, heads, head_dim]."""
        if self._here is None:
            return original(query, key, value, mask)
        config = attention.config
        # The mask that comes here is the window's, over whole rows.
        window = (
            config.sliding_window_size
            if getattr(attention, "apply_sliding_window_attention", False)
            else None
        )
        factor = getattr(attention, "mscale", 1.0) ** 2
        out = packed_attention(
            query,
            key,
            value,
            self._here.cu_seqlens,
            max_seqlen=self._here.max_seqlen,
            scale=factor * (getattr(config, "attention_scores_scalar", None) or query.size(-1)) ** -0.5,
            window=window,
            softcap=getattr(config, "attention_logit_softcapping", None),
            backend=self._backend,
        )
        return out.transpose(1, 2)
