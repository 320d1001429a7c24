"""Assigns documents to training, validation and test by seed and document number alone."""

import warnings
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_memkit.data.sources.records import RecordKind, RecordOptions
from lightning_memkit.utilities.errors import NoEffectWarning
from lightning_memkit.utilities.given import refuse_no_number, refuse_no_truth


@dataclass(frozen=True, kw_only=True)
class DocumentOptions:
    """Which documents are read, and for what.

    Args:
        text_field: The field of a record that holds the text.
        kind: Which fields of a record form the document: "text", "messages", "prompt" (with "completion") or
            "input_ids"; "auto" detects it.
        mask_prompt: Only the answers of a conversation, or the completion of a prompt, have labels; false
            gives labels to all tokens.
        limit: Takes this many documents, drawn at random, for tiny runs; null takes all.
        validation: Fraction of the documents kept for validation, 0 to 1.
        test: Fraction of the documents kept for testing; 0 tests on the validation documents.
        seed: The seed of every random choice: limits, shares, shuffling.
        processes: Most processes that tokenise; null: one per core. One process does what takes about a
            second.
        kept_apart: The first packed batch of a run shows whether documents in a row see each other. If they do,
            transformers models get packed attention for the run, and others an error; false allows it.
    """

    text_field: str = "text"
    kind: RecordKind = "auto"
    mask_prompt: bool = True
    limit: int | None = None
    validation: float = 0.05
    test: float = 0.0
    seed: int = 0
    processes: int | None = None
    kept_apart: bool = True

    def __post_init__(self) -> None:
        for name in ("mask_prompt", "kept_apart"):
            refuse_no_truth(name, getattr(self, name))
        for name in ("limit", "seed", "processes"):
            refuse_no_number(name, getattr(self, name), or_none=name != "seed")
        for name in ("validation", "test"):
            refuse_no_number(name, getattr(self, name), whole=False)
            value = getattr(self, name)
            if not 0 <= value < 1:
                raise ValueError(f"{name}={value} is outside [0, 1); for 5 % write 0.05.")
        if self.validation + self.test >= 1:
            raise ValueError(
                f"validation={self.validation} and test={self.test} leave "
                "nothing to train on; their sum is below 1."
            )
        if self.seed < 0:
            raise ValueError(f"seed={self.seed} is below 0; choose 0 or more.")
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"limit={self.limit} is below 1; null takes all documents.")
        if self.processes is not None and self.processes < 1:
            raise ValueError(f"processes={self.processes} is below 1; null takes one for every core.")
        _ = self.records

    @property
    def records(self) -> RecordOptions:
        """How a record is read."""
        return RecordOptions(text_field=self.text_field, kind=self.kind, mask_prompt=self.mask_prompt)


def deal_documents(count: int, options: DocumentOptions) -> dict[str, NDArray[np.int64]]:
    """The numbers of the documents to train, validate and test on.

    A document's share follows from the seed and its number, so it stays the same when documents are added
    after it.
    """
    numbers = drawn_documents(count, options)
    shares = {name: numbers[is_of_share(numbers, name, options)] for name in ("train", "validation", "test")}
    for name, wanted in (("train", True), ("validation", options.validation), ("test", options.test)):
        if wanted and not len(shares[name]):
            message = f"Of {len(numbers)} documents none falls to {name}; give more, or change the fractions."
            if name == "train":
                raise ValueError(message)
            warnings.warn(message, NoEffectWarning, stacklevel=2)
    return shares


def drawn_documents(count: int, options: DocumentOptions) -> NDArray[np.int64]:
    """The numbers of all documents, or of as many as the limit allows."""
    if options.limit is None or options.limit >= count:
        return np.arange(count)
    return np.sort(np.random.default_rng(options.seed).choice(count, options.limit, replace=False))


def is_of_share(numbers: NDArray[np.int64], share: str, options: DocumentOptions) -> NDArray[np.bool_]:
    """Which of these documents belong to "train", "validation" or "test"."""
    place = _uniform(numbers, options.seed)
    test, validation = options.test, options.test + options.validation
    bounds = {"test": (0.0, test), "validation": (test, validation), "train": (validation, 1.0)}
    first, last = bounds[share]
    return (place >= first) & (place < last)


def _uniform(numbers: NDArray[np.int64], seed: int) -> NDArray[np.float64]:
    """A number in [0, 1) for each, by the SplitMix64 hash (Steele et al. 2014)."""
    with np.errstate(over="ignore"):
        x = numbers.astype(np.uint64) + np.uint64(seed % 2**32) * np.uint64(2**32)
        x += np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x ^= x >> np.uint64(31)
    return (x >> np.uint64(11)) * 2.0**-53
