"""Documents to packed batches for Lightning: any source, every rank its share, resumable anywhere."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from inspect import signature
from typing import Any

import lightning.pytorch as pl
import numpy as np
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from numpy.typing import NDArray

from lightning_memkit.data.batch import PackedBatch
from lightning_memkit.data.cache import cached
from lightning_memkit.data.collate import full_batch, rounded_length
from lightning_memkit.data.corpora import python_stdlib, read_texts
from lightning_memkit.data.loader import LoaderOptions, PackedLoader, PackedRows
from lightning_memkit.data.packing import LongDocuments, Packing, PackingMode, pack
from lightning_memkit.data.shares import DocumentOptions, deal_documents
from lightning_memkit.data.standard_library import corpus_name
from lightning_memkit.data.store import TokenStore
from lightning_memkit.data.tokenizers import Tokenizer, load_tokenizer


@dataclass(frozen=True, kw_only=True)
class BatchOptions:
    """How rows become batches.

    Args:
        num_workers: Processes that build batches ahead. Packing from memory takes microseconds: 0 often does.
        drop_last: Leaves out an epoch's last training step if it has fewer rows than the others.
        multiple_of: Rounds a batch's length up to a multiple, never beyond the context.
    """

    num_workers: int = 0
    drop_last: bool = False
    multiple_of: int = 1


_ALL_DOCUMENTS, _PLAIN_BATCHES = DocumentOptions(), BatchOptions()


class PackedDataModule(pl.LightningDataModule):
    """Documents as packed rows, 99.9 % full where their lengths allow it; 2 bytes of memory a token.

    The batch is the *effective* one of a step and rank; ``MemoryBudget`` cuts it to what fits. Training rows
    come in a new order every epoch, and resume exactly where they stopped.

    Args:
        source: ``python-stdlib`` (the functions of Python's own standard library), the path of a ``.jsonl`` or
            ``.txt`` file (documents between blank lines), a folder of ``.txt`` files (each a document), or an
            object of tokenised documents: a Hugging Face dataset with ``input_ids``, a list of such records, or
            of sequences of token ids.
        tokenizer: ``bytes`` (vocabulary 259), or the name or path of a Hugging Face tokenizer. Token ids are
            taken as they are.
        context: Tokens a row can hold.
        batch_size: Rows a step and rank.
        packing: ``bfd`` fills rows by best-fit decreasing; ``none`` gives each document its own row.
        long_documents: What becomes of a document longer than the context: ``error`` refuses it, ``split`` cuts
            it into pieces, ``truncate`` drops its end. The summary at setup counts them.
        documents: Which documents are read, and for what.
        batches: How rows become batches.

    Raises:
        ValueError: an option is out of range; at setup: the corpus is empty, a document is too long, or the
            tokenizer can't be loaded.
        MissingPackageError: at setup: the tokenizer needs ``transformers``.
    """

    def __init__(
        self,
        source: str | Sequence[Any] = "python-stdlib",
        tokenizer: str = "bytes",
        context: int = 2048,
        batch_size: int = 16,
        packing: PackingMode = "bfd",
        long_documents: LongDocuments = "error",
        documents: DocumentOptions = _ALL_DOCUMENTS,
        batches: BatchOptions = _PLAIN_BATCHES,
    ) -> None:
        super().__init__()
        pack(
            [], context, packing=packing, long_documents=long_documents
        )  # checks the options now, not at setup
        rounded_length(context, context, batches.multiple_of)
        LoaderOptions(batch_size=batch_size, num_workers=batches.num_workers)
        self.source = source
        self.tokenizer = tokenizer
        self.context = context
        self.batch_size = batch_size
        self.packing: PackingMode = packing
        self.long_documents: LongDocuments = long_documents
        self.documents = documents
        self.batches = batches
        self._splits: dict[str, PackedRows] = {}
        self._train_loader: PackedLoader | None = None
        self._state_to_load: dict[str, Any] | None = None

    @cached_property
    def vocabulary_size(self) -> int:
        """Token ids are below this."""
        return self._tokenizer.vocabulary_size if self._tokenizer else int(self._store.tokens.max()) + 1

    @property
    def pad_id(self) -> int:
        """The token that fills a row's end."""
        return self._tokenizer.pad_id if self._tokenizer else 0

    def prepare_data(self) -> None:
        """Fills the caches in one process before the others read them."""
        if isinstance(self.source, str):
            _ = self._store

    def setup(self, stage: str | None = None) -> None:
        """Reads, tokenises and packs, once; says what came of it."""
        if self._splits:
            return
        store = self._store
        shares = deal_documents(store.documents, self.documents)
        for name, numbers in shares.items():
            if len(numbers) or name == "train":
                try:
                    self._splits[name] = self._rows(store, numbers)
                except ValueError as error:
                    self._splits.clear()  # so that another setup tries again
                    raise ValueError(f"In the share {name!r}: {error}") from None
        rank_zero_info(self.summary())

    def summary(self) -> str:
        """The size of the vocabulary; what was read and packed, a line a share of the documents."""
        shares = (_line(name, rows.packing) for name, rows in self._splits.items())
        return "\n".join((f"vocabulary: {self.vocabulary_size:,} token ids", *shares))

    def train_dataloader(self) -> PackedLoader:
        """Rows in a new order every epoch; where a checkpoint stopped, if one was loaded."""
        # The same batches over and over is what overfit_batches asks for.
        overfit = bool(self.trainer and getattr(self.trainer, "overfit_batches", 0))
        loader = self._loader("train", shuffle=not overfit, drop_last=self.batches.drop_last)
        if self._state_to_load is not None:
            # Lightning itself never hands a loader its state where estimated_stepping_batches was asked for.
            loader.load_state_dict(self._state_to_load)
            self._state_to_load = None
        self._train_loader = loader
        return loader

    def val_dataloader(self) -> PackedLoader | list[Any]:
        """The validation documents, in the same order every time."""
        return self._loader("validation") if "validation" in self._splits else []

    def test_dataloader(self) -> PackedLoader | list[Any]:
        """The test documents, in the same order every time; without a test share the validation documents."""
        return self._loader("test") if "test" in self._splits else self.val_dataloader()

    def predict_dataloader(self) -> PackedLoader | list[Any]:
        """What is tested on."""
        return self.test_dataloader()

    def worst_batch(self, rows: int) -> PackedBatch:
        """Random tokens in the longest rows there are, each one document: what costs the most memory."""
        length = max((share.longest_batch for share in self._splits.values()), default=self.context)
        return full_batch(rows, length, vocabulary=self.vocabulary_size, seed=self.documents.seed)

    def state_dict(self) -> dict[str, Any]:
        """Where the training loader stands; part of every checkpoint."""
        return {} if self._train_loader is None else {"train_loader": self._train_loader.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keeps the position for the training loader, where one is about to be asked for."""
        if self.trainer is None or self.trainer.state.fn == TrainerFn.FITTING:
            self._state_to_load = state_dict.get("train_loader")

    def __repr__(self) -> str:
        arguments = ", ".join(f"{name}={getattr(self, name)!r}" for name in signature(type(self)).parameters)
        return f"{type(self).__name__}({arguments})"

    @cached_property
    def _tokenizer(self) -> Tokenizer | None:
        return load_tokenizer(self.tokenizer) if isinstance(self.source, str) else None

    @cached_property
    def _store(self) -> TokenStore:
        store = self._read()
        if len(store.tokens) == 0:
            raise ValueError(f"The source holds {store.documents} documents and no token; give at least one.")
        return store

    def _read(self) -> TokenStore:
        tokenizer = self._tokenizer
        if tokenizer is None or not isinstance(self.source, str):
            return TokenStore.of(self.source)
        if self.source != "python-stdlib":
            return tokenizer.tokenize(read_texts(self.source, text_field=self.documents.text_field))
        if tokenizer.key == "bytes":  # quicker made than read
            return tokenizer.tokenize(python_stdlib())
        return cached(f"{corpus_name()}-{tokenizer.key}", lambda: tokenizer.tokenize(python_stdlib()))

    def _rows(self, store: TokenStore, numbers: NDArray[np.int64]) -> PackedRows:
        packing = pack(
            store.lengths[numbers],
            self.context,
            packing=self.packing,
            long_documents=self.long_documents,
            seed=self.documents.seed,
        )
        return PackedRows(
            store=store,
            packing=replace(packing, documents=numbers.astype(packing.documents.dtype)[packing.documents]),
            pad_id=self.pad_id,
            multiple_of=self.batches.multiple_of,
        )

    def _loader(self, share: str, *, shuffle: bool = False, drop_last: bool = False) -> PackedLoader:
        trainer = self.trainer
        ranks = (getattr(trainer, "distributed_sampler_kwargs", None) if trainer else None) or {}
        options = LoaderOptions(
            batch_size=self.batch_size,
            shuffle=shuffle,
            seed=self.documents.seed,
            drop_last=drop_last,
            num_workers=self.batches.num_workers,
            pin_memory=trainer is not None and trainer.strategy.root_device.type == "cuda",
        )
        return PackedLoader(
            self._splits[share], options, rank=ranks.get("rank", 0), world_size=ranks.get("num_replicas", 1)
        )


def _line(share: str, packing: Packing) -> str:
    bound = packing.tokens / (packing.lower_bound_rows * packing.context)
    documents = int(np.count_nonzero(packing.starts == 0))
    notes = [
        f"{packing.split_documents:,} split",
        f"{packing.truncated_documents:,} truncated ({packing.truncated_tokens:,} tokens dropped)",
        f"{packing.empty_documents:,} empty",
    ]
    return (
        f"{share}: {documents:,} documents, {packing.tokens:,} tokens in {packing.rows:,} rows of "
        f"{packing.context:,}, {packing.efficiency:.2%} full (at best {bound:.2%}); documents "
        + ", ".join(notes)
    )
