"""`use_packed_attention`: one switch for models written by others."""

import warnings
from collections.abc import Callable
from typing import get_args

from torch import nn

from lightning_memkit.attention.door import Backend
from lightning_memkit.attention.hugging_face import is_transformers_model, switch
from lightning_memkit.utilities.errors import NoEffectWarning


def use_packed_attention(module: nn.Module, backend: Backend = "auto") -> Callable[[], None]:
    """Make transformers models inside a module keep packed documents apart, without saving a mask.

    Afterwards their forward takes a `PackedBatch` as it is, ``model(**batch)``. Without ``cu_seqlens``,
    documents begin where ``position_ids`` restart. A forward without either attends as before. Packed
    documents use no cache.

    Args:
        module: A LightningModule or any other module; the models in it are found.
        backend: See `packed_attention`.

    Returns:
        The undo: a function that restores the models' own attention exactly.

    Raises:
        ValueError: A model's attention can't be replaced; the message says why, and what to do.
    """
    if backend not in get_args(Backend):
        raise ValueError(f"backend={backend!r} is unknown; choose one of {get_args(Backend)}.")
    undos: list[Callable[[], None]] = []

    def undo() -> None:
        while undos:
            undos.pop()()

    try:
        for model in outermost_models(module):
            undos.append(switch(model, backend))
    except ValueError:
        undo()
        raise
    if not undos:
        warnings.warn(
            f"No model of transformers is in {type(module).__name__}, so nothing changed; call "
            "packed_attention in your own attention, and hand it cu_seqlens.",
            NoEffectWarning,
            stacklevel=2,
        )
    return undo


def outermost_models(module: nn.Module) -> list[nn.Module]:
    """The models of transformers in a module that are in no other one."""
    if is_transformers_model(module):
        return [module]
    return [model for child in module.children() for model in outermost_models(child)]
