"""Refuses token ids without a row in a model's table: on a GPU a kernel's assertion fails without a name."""

from typing import Any

from torch import Tensor, nn

from lightning_memkit.data.sources.lookups import KnownIds, Lookups, too_few
from lightning_memkit.utilities.patching import Undo, replace_method

_FAST = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder)


def refuse_ids_beyond_embedding(module: nn.Module, ids: int, tokenizer: str) -> None:
    """Refuse documents with token ids for which a transformers model in the module has no embedding.

    Args:
        module: searched for the outermost modules that have `get_input_embeddings`.
        ids: an upper bound (exclusive) of the documents' token ids.
        tokenizer: its name, for the message.

    Raises:
        ValueError: an embedding has fewer rows; names both numbers and the remedy.
    """
    for name, rows in _embeddings(module):
        if rows < ids:
            raise ValueError(
                f"{too_few(f'the embedding of {name}', rows, ids, tokenizer)} (a loaded one: "
                f"resize_token_embeddings({ids})), or take its tokenizer."
            )


def watch_lookups(module: nn.Module, step: str, known: KnownIds) -> Undo:
    """Name what has too few rows or classes for the data's token ids, before torch fails on it; returns the undo.

    Costs a look at the indices of each lookup, for which a GPU is waited for. Compiled modules are left alone: they
    would be compiled again.

    Args:
        module: of any class; its embeddings are watched, and within its step all functions that look up.
        step: the name of the method that is given the batch, such as ``training_step``.
        known: the largest token id.
    """
    if getattr(module, "_compiler_ctx", None) is not None or any(map(_is_compiled, module.modules())):
        return lambda: None
    lookups = Lookups(module, known)

    def look(embedding: nn.Embedding, given: tuple[Any, ...]) -> None:
        if given and isinstance(given[0], Tensor):
            lookups.look(given[0], embedding.num_embeddings, embedding.weight)

    def watched(instance: nn.Module, plain: Any, *args: Any, **kwargs: Any) -> Any:
        if instance is not module:  # a copy, which has this method, too
            return plain(*args, **kwargs)
        with lookups.within((*args, *kwargs.values()), follows=not _has_fast_path(module)):
            return plain(*args, **kwargs)

    undos = [replace_method(module, step, watched, like=getattr(module, step))]
    undos += [
        part.register_forward_pre_hook(look).remove
        for part in module.modules()
        if isinstance(part, nn.Embedding)
    ]

    def undo() -> None:
        while undos:
            undos.pop()()

    return undo


def _is_compiled(part: nn.Module) -> bool:
    return type(part).__name__ == "OptimizedModule" or part._compiled_call_impl is not None


def _has_fast_path(module: nn.Module) -> bool:
    """Whether something in it takes another kernel in evaluation, and not where torch functions are watched."""
    return any(isinstance(part, _FAST) and not part.training for part in module.modules())


def _embeddings(module: nn.Module, name: str = "") -> list[tuple[str, int]]:
    tells = getattr(module, "get_input_embeddings", None)
    if callable(tells):
        try:
            embedding: Any = tells()
        except NotImplementedError:  # a submodule without an embedding
            embedding = None
        rows = getattr(embedding, "num_embeddings", None)
        return [(f"{name} ({type(module).__name__})", rows)] if isinstance(rows, int) else []
    children = ((f"{name}.{child}" if name else child, part) for child, part in module.named_children())
    return [found for child, part in children for found in _embeddings(part, child)]
