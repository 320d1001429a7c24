"""Packed batches of documents for Lightning: any source, sharded over ranks, resumable at any batch."""

from inspect import signature
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info

from lightning_memkit.data.batching.batch import PackedBatch
from lightning_memkit.data.batching.batch_plan import Padding
from lightning_memkit.data.batching.collate import full_batch
from lightning_memkit.data.batching.share_packing import SharePacking, vocabulary_of
from lightning_memkit.data.batching.stream_batches import Stream
from lightning_memkit.data.batching.summary import summary_line
from lightning_memkit.data.loading.batch_options import BatchOptions
from lightning_memkit.data.loading.copy_ahead import pinning_helps
from lightning_memkit.data.loading.loader import LoaderOptions, PackedLoader, PackedRows
from lightning_memkit.data.loading.stream_loader import StreamLoader
from lightning_memkit.data.packing.pack import LongDocuments, PackingMode, WorkLimit, pack
from lightning_memkit.data.sources.corpus import Corpus, refuse_no_source, shares_of
from lightning_memkit.data.sources.shares import DocumentOptions
from lightning_memkit.data.sources.stream_source import is_stream
from lightning_memkit.data.sources.tokenizers import load_tokenizer
from lightning_memkit.data.sources.vocabulary import refuse_ids_beyond_embedding
from lightning_memkit.plugins.data._own_callbacks import OwnCallbacks
from lightning_memkit.plugins.data._own_datasets import Source, own_datasets
from lightning_memkit.utilities.given import given_options

_ROWS = 16  # of a batch, if nothing else limits it
Loader = PackedLoader | StreamLoader
_ALL_DOCUMENTS, _PLAIN_BATCHES = DocumentOptions(), BatchOptions()


class PackedDataModule(pl.LightningDataModule):
    """Packs documents into rows, 99.9 % full if lengths allow it; 2 bytes a token on disk, memory-mapped.

    The batch is the *effective* one of a step and rank; ``MemoryBudget`` splits it into micro-batches that
    fit. Training rows come in a new order every epoch, and a resume continues exactly where the run stopped.
    The fullness of rows, documents, tokens and truncations are logged as ``packing/...``. If documents of a row see
    each other, a transformers model is given packed attention for the run, and another model's run stops.

    Args:
        source: ``python-stdlib`` (the functions of Python's own standard library); the path of a ``.jsonl``,
            ``.parquet``, ``.arrow`` or ``.txt`` file (documents between blank lines), a list of such paths, or a
            folder (each ``.txt`` file a document); a table of the ``datasets`` package; texts, records or sequences
            of token ids; an iterable without a length, or a function that returns one (``packing="stream"``); another
            LightningDataModule, whose data sets are packed; or a mapping that gives one of these for ``train``,
            ``validation``, ``test`` and ``predict``.
        tokenizer: ``bytes`` (vocabulary 259), or the name or path of a Hugging Face tokenizer. Token ids are
            taken as they are.
        context: Tokens a row can hold.
        batch_size: The most rows a step and rank; null means 16, or as many as ``batch_tokens`` allow.
        packing: ``bfd`` packs by best-fit decreasing; ``stream`` packs one window of incoming documents at a
            time; ``none`` gives each document its own row.
        long_documents: What becomes of a document longer than the context: ``error`` refuses it, ``split``
            makes chunks of it, ``truncate`` drops its end. The summary at setup counts them.
        documents: Which documents are read, and for which split; or a mapping of these options.
        batches: How rows become batches; or a mapping of these options.
        padding: ``longest`` combines any rows in a batch, ``bucket`` rows of similar length; both pad to the
            longest row.
        batch_tokens: The most tokens a step and rank, including padding: batches of shorter rows hold more
            rows. Beside a ``batch_size``, both are limits.
        work_limit: Also limits the attention work of each row, so that rows take equal time;
            ``long_documents`` applies to a document that exceeds it.

    Raises:
        ValueError: an option is out of range; at setup: the corpus is empty, a document is too long, or the
            tokenizer can't be loaded; before the first step: a transformers model has no embedding for some token.
        MissingPackageError: at setup: the tokenizer needs ``transformers``.
    """

    def __init__(
        self,
        source: Source = "python-stdlib",
        tokenizer: str = "bytes",
        context: int = 2048,
        batch_size: int | None = None,
        packing: PackingMode = "bfd",
        long_documents: LongDocuments = "error",
        documents: DocumentOptions = _ALL_DOCUMENTS,
        batches: BatchOptions = _PLAIN_BATCHES,
        padding: Padding = "longest",
        batch_tokens: int | None = None,
        work_limit: WorkLimit | None = None,
    ) -> None:
        super().__init__()
        refuse_no_source(source)
        self.source = source
        self.documents = given_options("documents", documents, DocumentOptions)
        self.batches = given_options("batches", batches, BatchOptions)
        self.work_limit = None if work_limit is None else given_options("work_limit", work_limit, WorkLimit)
        self._corpus = Corpus(tokenizer_name=tokenizer, options=self.documents)
        self.tokenizer = self._corpus.tokenizer_name
        # Packing nothing checks the options now instead of at setup.
        pack([], context, packing=packing, long_documents=long_documents, work_limit=self.work_limit)
        self.context = context
        self.batch_size = _ROWS if batch_size is None and batch_tokens is None else batch_size
        self.packing: PackingMode = packing
        self.long_documents: LongDocuments = long_documents
        self.padding: Padding = padding
        self.batch_tokens = batch_tokens
        self._splits: dict[str, PackedRows | Stream] = {}
        self._train_loader: Loader | None = None
        self._state_to_load: dict[str, Any] | None = None
        self._is_prepared = False
        self._callbacks = OwnCallbacks()
        self._loader_options(shuffle=True)

    @property
    def vocabulary_size(self) -> int:
        """The size of the vocabulary: all token ids are below it.

        Raises:
            ValueError: the source is a stream of token ids, whose vocabulary is unknown.
        """
        if not self._splits and isinstance(self.source, str):
            return load_tokenizer(self.tokenizer).vocabulary_size
        if not self._splits:
            self.setup()
        return vocabulary_of(self._corpus, self._splits)

    @property
    def pad_id(self) -> int:
        """The token that pads rows."""
        return self._corpus.pad_id

    def prepare_data(self) -> None:
        """Fill the caches in one process before the others read them."""
        if isinstance(self.source, pl.LightningDataModule):
            self.source.prepare_data()
            return
        for source in (shares_of(self.source) or {"all": self.source}).values():
            if not is_stream(source):
                self._corpus.read(source)
        self._is_prepared = True

    def setup(self, stage: str | None = None) -> None:
        """Read, tokenise and pack once; log a summary."""
        if self.trainer is not None:
            probing = self.documents.kept_apart and self.packing != "none"
            self._callbacks.put_into(self.trainer, probing=probing)
        if stage == "fit":
            self._train_loader = None  # belongs to an earlier fit, whose counts must not continue
        if self._splits and not isinstance(self.source, pl.LightningDataModule):
            return
        before = dict(self._splits)
        try:
            self._read_shares(stage)
        except BaseException:
            self._splits = before  # so that another setup reads again
            raise
        if self._splits.keys() != before.keys():
            rank_zero_info(self.summary())

    def teardown(self, stage: str | None = None) -> None:
        """Remove from the trainer the callbacks that setup added."""
        if self.trainer is not None:
            self._callbacks.take_out_of(self.trainer)

    def summary(self) -> str:
        """The size of the vocabulary, and what was read and packed, one line a split."""
        try:
            vocabulary = f"vocabulary: {self.vocabulary_size:,} token ids"
        except ValueError:
            vocabulary = "vocabulary: that of the stream's token ids"
        return "\n".join((vocabulary, *(summary_line(name, rows) for name, rows in self._splits.items())))

    def train_dataloader(self) -> Loader:
        """Rows in a new order every epoch; continues from a checkpoint if one was loaded."""
        if "train" not in self._splits:
            raise ValueError(
                f"There are no documents to train on (found: {list(self._splits)}); give 'train' a source, too."
            )
        # overfit_batches needs the same batches in every epoch.
        overfit = bool(self.trainer and getattr(self.trainer, "overfit_batches", 0))
        loader = self._loader("train", shuffle=not overfit, drop_last=self.batches.drop_last)
        if self._state_to_load is not None:
            # Set the state here: Lightning does not restore a loader if estimated_stepping_batches was read
            # before.
            loader.load_state_dict(self._state_to_load)
            self._state_to_load = None
            if isinstance(loader, PackedLoader) and (note := loader.resumed_on_other_ranks):
                rank_zero_info(f"train: {note}")
        elif self._train_loader is not None:  # reloaded during training: continue the old loader's counts
            before: Any = self._train_loader  # of the same class as `loader`
            loader.go_on_after(before)
        self._train_loader = self._callbacks.log.loader = loader
        return loader

    def val_dataloader(self) -> Loader | list[Any]:
        """The validation documents, in the same order every time."""
        return self._loader("validation") if "validation" in self._splits else []

    def test_dataloader(self) -> Loader | list[Any]:
        """The test documents, always in the same order; the validation documents if there are none."""
        return self._loader("test") if "test" in self._splits else self.val_dataloader()

    def predict_dataloader(self) -> Loader | list[Any]:
        """The documents to predict on, always in the same order; the test documents if there are none."""
        return self._loader("predict") if "predict" in self._splits else self.test_dataloader()

    def worst_batch(self, rows: int) -> PackedBatch:
        """Random tokens in the longest possible rows, one document each: the batch that needs most memory."""
        lengths = [rows.longest_batch for rows in self._splits.values() if isinstance(rows, PackedRows)]
        length = self.context if len(lengths) < len(self._splits) else max(lengths, default=self.context)
        try:
            vocabulary = self.vocabulary_size
        except ValueError:
            vocabulary = 1
        return full_batch(rows, length, vocabulary=vocabulary, seed=self.documents.seed)

    def state_dict(self) -> dict[str, Any]:
        """The position of the training loader, saved in every checkpoint."""
        return {} if self._train_loader is None else {"train_loader": self._train_loader.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the position for the next training loader; a trainer that does not fit ignores it."""
        if self.trainer is None or self.trainer.state.fn == TrainerFn.FITTING:
            self._state_to_load = state_dict.get("train_loader")

    def __repr__(self) -> str:
        arguments = ", ".join(f"{name}={getattr(self, name)!r}" for name in signature(type(self)).parameters)
        return f"{type(self).__name__}({arguments})"

    def _refuse_ids(self, share: str) -> None:
        rows, look = self._splits[share], self._callbacks.ids
        module = None if self.trainer is None else getattr(self.trainer, "lightning_module", None)
        look.tokenizer = self.tokenizer
        if module is not None and isinstance(rows, PackedRows):
            bound = max(rows.store.vocabulary, self.pad_id + 1)
            look.add(rows.store, bound)
            refuse_ids_beyond_embedding(module, bound, self.tokenizer)

    def _read_shares(self, stage: str | None) -> None:
        if isinstance(self.source, pl.LightningDataModule):
            sources: dict[str, Any] | None = own_datasets(self.source, self.trainer, stage)
        else:
            sources = shares_of(self.source)
        packing = self._packing()
        if sources is None:
            self._splits |= packing.dealt(self.source)
        else:
            for share, source in sources.items():
                if share not in self._splits:
                    self._splits[share] = packing.whole(share, source)
        for rows in self._splits.values():
            if isinstance(rows, Stream):  # built only to check the options now instead of in training
                StreamLoader(rows, self._loader_options(shuffle=False))

    def _packing(self) -> SharePacking:
        # With a trainer, one process of each machine has verified the cache's checksums in prepare_data
        # already.
        is_alone = self.trainer is None or getattr(self.trainer, "local_rank", 0) == 0
        return SharePacking(
            corpus=self._corpus,
            verify=is_alone and not self._is_prepared,
            context=self.context,
            packing=self.packing,
            long_documents=self.long_documents,
            work_limit=self.work_limit,
            multiple_of=self.batches.multiple_of,
            batch_tokens=self.batch_tokens,
        )

    def _loader(self, share: str, *, shuffle: bool = False, drop_last: bool = False) -> Loader:
        self._refuse_ids(share)
        trainer = self.trainer
        ranks = (getattr(trainer, "distributed_sampler_kwargs", None) if trainer else None) or {}
        options = self._loader_options(shuffle=shuffle, drop_last=drop_last)
        where = {"rank": ranks.get("rank", 0), "world_size": ranks.get("num_replicas", 1)}
        rows = self._splits[share]
        if isinstance(rows, Stream):
            return StreamLoader(rows, options, **where)
        loader = PackedLoader(rows, options, **where)
        if loader.dropped_rows and not drop_last:
            rank_zero_info(
                f"{share}: {loader.dropped_rows} of {len(loader.rows)} rows can't be shared by {loader.world_size} "
                "ranks in batches of one row, and are left out, in every epoch others; a larger batch_size deals all."
            )
        if options.num_workers and share == "train":
            rank_zero_info(f"{options.num_workers} workers: {loader.memory}")
        return loader

    def _loader_options(self, *, shuffle: bool, drop_last: bool = False) -> LoaderOptions:
        trainer, batches = self.trainer, self.batches
        processes = getattr(trainer, "num_devices", 1) if trainer is not None else 1
        return LoaderOptions(
            batch_size=self.batch_size,
            batch_tokens=self.batch_tokens,
            padding=self.padding,
            shuffle=shuffle,
            seed=self.documents.seed,
            drop_last=drop_last,
            num_workers=batches.num_workers,
            prefetch=batches.prefetch,
            pin_memory=trainer is not None and pinning_helps(trainer.strategy.root_device),
            room=batches.room(processes),
        )
