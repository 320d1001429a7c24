"""Refuses token ids without a row in a model's embedding: on a GPU a kernel's assertion fails without a name."""

from functools import partial
from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from lightning_memkit.utilities.patching import Undo


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
                f"{_too_few(f'the embedding of {name}', rows, ids, tokenizer)} (a loaded one: "
                f"resize_token_embeddings({ids})), or take its tokenizer."
            )


def watch_embeddings(module: nn.Module, ids: int, tokenizer: str) -> Undo:
    """Name any embedding that is given an id beyond its rows, before torch fails on it; returns the undo.

    Costs a look at the ids of each call, for which a GPU is waited for. Compiled modules are left alone: hooks
    would have them compiled again.

    Args:
        module: its embeddings are watched, of any class of model.
        ids: an upper bound (exclusive) of the documents' token ids; 0 if only those that are seen are known.
        tokenizer: its name, for the message.
    """

    def look(embedding: nn.Embedding, given: tuple[Any, ...], *, name: str) -> None:
        looked_up = given[0] if given else None
        if not isinstance(looked_up, Tensor) or isinstance(looked_up, FakeTensor) or not looked_up.numel():
            return
        if (largest := int(looked_up.max())) >= embedding.num_embeddings:
            said = _too_few(
                f"the embedding {name}", embedding.num_embeddings, max(ids, largest + 1), tokenizer
            )
            raise ValueError(f"{said}, or take its tokenizer.")

    if any(type(part).__name__ == "OptimizedModule" or part._compiled_call_impl for part in module.modules()):
        return lambda: None
    handles = [
        part.register_forward_pre_hook(partial(look, name=name))
        for name, part in module.named_modules()
        if isinstance(part, nn.Embedding)
    ]

    def undo() -> None:
        for handle in handles:
            handle.remove()

    return undo


def _too_few(embedding: str, rows: int, ids: int, tokenizer: str) -> str:
    return (
        f"Documents have token ids up to {ids - 1} (tokenizer={tokenizer!r}), and {embedding} has {rows} rows. Build "
        f"the model with vocab_size={ids} or more"
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
