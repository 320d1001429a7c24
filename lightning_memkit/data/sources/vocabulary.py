"""Refuses token ids without a row in a model's embedding: on a GPU a kernel's assertion fails without a name."""

from typing import Any

from torch import nn


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
                f"The documents have token ids up to {ids - 1} (tokenizer={tokenizer!r}), but the input embedding of "
                f"{name} has {rows} rows, so ids can be {rows - 1} at most. Build the model with vocab_size={ids} or "
                f"more (a loaded one: resize_token_embeddings({ids})), or take the tokenizer that belongs to it."
            )


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
