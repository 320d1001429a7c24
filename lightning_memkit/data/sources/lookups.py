"""Sees which tables and classes a step looks token ids up in, and refuses those that are too small for the data."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from lightning_memkit.data.batching.batch import IGNORED_LABEL

_HEAD, _ONE_HOT = "the head", "one_hot"
_LOSSES = ("cross_entropy", "nll_loss")
_GATHERS = ("gather", "take_along_dim", "index_select")
# These return their first argument's values as they are, or a part of them. One that can replace values (clamp,
# where, masked_fill) or choose among them (masks, tensors of indices) is not among them.
_KEEPS = {
    "clone", "contiguous", "cpu", "cuda", "detach", "expand", "expand_as", "flatten", "int", "long", "movedim",
    "narrow", "pad", "permute", "ravel", "repeat", "reshape", "roll", "squeeze", "swapaxes", "t", "to", "transpose",
    "unflatten", "unsqueeze", "view", "view_as",
}  # fmt: skip
_AS_THEY_ARE = (torch.int64, torch.int32)  # a narrower dtype changes large ids


@dataclass(frozen=True, kw_only=True)
class KnownIds:
    """What is known of the documents' token ids.

    Args:
        ids: an upper bound (exclusive), padding included; 0 if only those that are seen are known.
        labels: the same for those that are labels, without padding; called only if some might be missing.
        tokenizer: its name, for the message.
    """

    ids: int
    labels: Callable[[], int]
    tokenizer: str

    def refusal(self, what: str, rows: int, largest: int = -1) -> ValueError:
        """The error: both numbers, and the remedy."""
        return ValueError(
            f"{too_few(what, rows, max(self.ids, largest + 1), self.tokenizer)}, or take its tokenizer."
        )


def too_few(what: str, rows: int, ids: int, tokenizer: str) -> str:
    """The rule that is broken, and the first remedy."""
    rule = f"Documents have token ids up to {ids - 1} (tokenizer={tokenizer!r}), and {what} has {rows} rows"
    if what.startswith((_HEAD, _ONE_HOT)):
        rule = f"{rule.removesuffix('rows')}classes"
    return f"{rule}. Build the model with vocab_size={ids} or more"


class Lookups(TorchFunctionMode):
    """While active, raises where a step's token ids or labels meet a table or classes too few for the data's.

    It follows ids and labels through views, copies and shifted slices, and compares the data's largest with the
    table's rows: a batch without that id is refused, too. Ids that a model clamps, hashes or offsets are followed no
    further. Those are refused only if torch is about to fail on them, and their values are some of the batch's.

    Args:
        module: its names are used in messages.
        known: the largest token id of the data.
    """

    def __init__(self, module: nn.Module, known: KnownIds) -> None:
        super().__init__()
        self._module, self._known = module, known
        self._kinds: Any = WeakIdKeyDictionary()  # followed tensors: "input_ids" or "labels"
        self._given: list[Tensor] = []

    @contextmanager
    def within(self, given: Any, *, follows: bool = True) -> Iterator[None]:
        """Watch a step that is given these arguments.

        Args:
            given: the step's arguments; token ids and labels are those of its mappings.
            follows: false if no torch function may be watched, and `look` is called by others only.
        """
        self._kinds, self._given = WeakIdKeyDictionary(), []
        for batch in given:
            for kind in ("input_ids", "labels") if isinstance(batch, Mapping) else ():
                if isinstance(values := batch.get(kind), Tensor) and values.dtype in _AS_THEY_ARE:
                    self._kinds[values] = kind
                    self._given.append(values)
        try:
            if follows and self._given:
                with self:
                    yield
            else:
                yield
        finally:
            self._kinds, self._given = WeakIdKeyDictionary(), []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function, after a look at the indices that it is given; follow ids into its result."""
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        for index, rows, what in _indices(name, func, args, kwargs):
            self.look(index, rows, what, ignored=kwargs.get("ignore_index", IGNORED_LABEL))
        result = func(*args, **kwargs)
        source = kwargs.get("out", args[0] if args else None)
        if not isinstance(source, Tensor) or source.dtype not in _AS_THEY_ARE:
            return result
        if "out" in kwargs or name == "__setitem__" or (name.endswith("_") and not name.endswith("__")):
            self._kinds = WeakIdKeyDictionary()  # values were replaced, maybe those of followed views
        elif source in self._kinds and isinstance(result, Tensor) and _keeps(name, func, args, kwargs):
            # Half of them at the least: a column of ids may be something else, such as a task's number.
            if result.dtype in _AS_THEY_ARE and 2 * result.numel() >= source.numel():
                self._kinds[result] = self._kinds[source]
        return result

    def look(self, index: Tensor, rows: int, what: Any, ignored: int = IGNORED_LABEL) -> None:
        """Refuse a table that is too small.

        Args:
            index: what is looked up.
            rows: of the table.
            what: the table, or the name of what has so few rows or classes.
            ignored: a value that is not looked up.

        Raises:
            ValueError: names the table, both numbers and the remedy.
        """
        if isinstance(index, FakeTensor) or index.is_meta or not index.numel():
            return
        if index in self._kinds and self._known.ids > 0:
            # Padding is no label, also not where a loss takes shifted ids for labels.
            is_label = self._kinds[index] == "labels" or (isinstance(what, str) and what.startswith(_HEAD))
            if rows < self._known.ids and rows < (self._known.labels() if is_label else self._known.ids):
                raise self._known.refusal(self._named(what, rows), rows)
        if (largest := self._missing(index, rows, ignored)) is not None:
            raise self._known.refusal(self._named(what, rows), rows, largest)

    def _missing(self, index: Tensor, rows: int, ignored: int) -> int | None:
        """The largest index, if it has no row, and all are values of the batch; None otherwise."""
        if index.is_cuda and torch.cuda.is_current_stream_capturing():
            return None
        try:
            if int(index.max()) < rows:
                return None
            wanted = index[index != ignored]
            largest = int(wanted.max()) if wanted.numel() else -1
            if largest < rows:
                return None
            # A zero often stands for a label that is ignored.
            alike = (torch.isin(wanted, values.to(wanted.device)) | (wanted == 0) for values in self._given)
            return largest if not self._given or any(bool(each.all()) for each in alike) else None
        except (RuntimeError, NotImplementedError):  # its values can't be read, as within vmap
            return None

    def _named(self, what: Any, rows: int) -> str:
        """What has too few rows, in the words of a message."""
        if isinstance(what, str):
            return what
        for name, part in self._module.named_modules():
            for own, tensor in (*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)):
                if tensor is what or what._base is tensor:
                    is_module = isinstance(part, nn.Embedding | nn.EmbeddingBag)
                    path = name if is_module else f"{name}.{own}" if name else own
                    return f"the {'embedding' if is_module else 'table'} {path}"
        if what.shape[0] == rows:
            return f"a tensor of the shape {tuple(what.shape)}, in which they are looked up,"
        return f"{_HEAD}, in whose values of the shape {tuple(what.shape)} they are looked up,"


def _keeps(name: str, func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a function returns the large ids of its first argument as they are."""
    if name == "__getitem__":
        places = args[1] if isinstance(args[1], tuple) else (args[1],)
        return all(place is None or place is Ellipsis or isinstance(place, slice) for place in places)
    if name in ("clamp", "clamp_min"):  # min=0, for labels that are ignored
        return len(args) <= 2 and kwargs.get("max") is None
    return name in _KEEPS or func in (Tensor.T.__get__, Tensor.mT.__get__)  # pyright: ignore[reportAttributeAccessIssue]


def _indices(name: str, func: Any, args: Any, kwargs: Any) -> Iterator[tuple[Tensor, int, Any]]:
    """What a function looks up: the indices, the rows that there are, and the table (or what else has so few)."""

    def argument(place: int, key: str, default: Any = None) -> Any:
        return args[place] if place < len(args) else kwargs.get(key, default)

    index: Any = None
    rows, what = 0, None
    if name in ("embedding", "embedding_bag"):
        index, table = argument(0, "input"), argument(1, "weight")
        if isinstance(index, Tensor) and index.is_floating_point():  # the order of torch.embedding
            index, table = table, index
        rows, what = _size(table, 0), table
    elif name in _GATHERS:
        swaps = name == "take_along_dim"
        table, dim = argument(0, "input"), argument(2 if swaps else 1, "dim")
        index = argument(1, "indices") if swaps else argument(2, "index")
        rows, what = _size(table, dim), table
    elif name == "__getitem__":
        table, places = args[0], args[1] if isinstance(args[1], tuple) else (args[1],)
        for dim, place in enumerate(places):
            if place is None or place is Ellipsis or (isinstance(place, Tensor) and _is_mask(place)):
                return  # what follows belongs to another dimension
            if _is_index(place):
                yield place, _size(table, dim), table
        return
    elif func is F.one_hot:
        index, rows, what = argument(0, "input"), argument(1, "num_classes", -1), _ONE_HOT
    elif name in _LOSSES:
        logits, index = argument(0, "input"), argument(1, "target")
        rows = _size(logits, 1 if isinstance(logits, Tensor) and logits.dim() > 1 else 0)
        what = f"{_HEAD} before {name}"
    if rows > 0 and _is_index(index):
        yield index, rows, what


def _size(table: Any, dim: Any) -> int:
    """A table's length in a dimension; 0 if that can't be told."""
    if not isinstance(table, Tensor) or not isinstance(dim, int) or not -table.dim() <= dim < table.dim():
        return 0
    return table.shape[dim]


def _is_mask(place: Tensor) -> bool:
    return place.dtype in (torch.bool, torch.uint8)


def _is_index(place: Any) -> bool:
    return isinstance(place, Tensor) and not (
        place.is_floating_point() or place.is_complex() or _is_mask(place)
    )
