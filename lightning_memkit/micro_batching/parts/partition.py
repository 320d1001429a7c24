"""How batches are split: into runs of rows, or by tokens where rows can drop their padding; and who may change it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from lightning_memkit.micro_batching import (
    Weigher,
    batch_size,
    even_sizes,
    split_batch,
)
from lightning_memkit.micro_batching.changes.composed_state import ComposedState
from lightning_memkit.micro_batching.graph.loss_head import Edges
from lightning_memkit.micro_batching.graph.loss_rules import LossRules
from lightning_memkit.micro_batching.graph.rests import RestRules
from lightning_memkit.micro_batching.parts.cut import Cut, Splitter
from lightning_memkit.micro_batching.parts.token_parts import (
    cuts_padding_alone,
    extent_of,
    parts_by_tokens,
    take_part,
    wide_tensors,
)
from lightning_memkit.micro_batching.shares.batch_counts import Foretelling

Form = tuple[int, int | None, int | None, int | None]
_LESS_PADDING = 0.9  # of the tokens: what makes copying and sorting rows worth while


@dataclass(frozen=True, kw_only=True)
class Combination:
    """How the loss of a batch, and its gradients, come from those of its micro-batches.

    Args:
        weigh: what a micro-batch holds of what the loss is a mean over; asked where `rules` is None.
        summed: the loss is a sum: every micro-batch weighs 1.
        rules: how the loss's terms add up, where its graph shows it: each micro-batch is weighed by its own loss.
        foretold: what the numbers of a batch tell of each rule's divisor before it runs.
        rests: how the parts of the loss without a gradient combine, with `rules`.
        state: attributes and lists that the step changes, which micro-batches leave as the batch would.
        head: the functions next to the losses that were compared; None where nothing was.
        untold: nothing says what micro-batches are weighed by: no comparison, no user.
    """

    weigh: Weigher = batch_size
    summed: bool = False
    rules: LossRules | None = None
    foretold: Foretelling = field(default_factory=Foretelling)
    rests: RestRules | None = None
    state: ComposedState | None = None
    head: Edges | None = None
    untold: bool = False


@dataclass(kw_only=True)
class Partition:
    """How batches are split, and how what their micro-batches give is combined.

    One object a run. Whoever learns something that changes it calls one of its methods; its attributes are assigned
    in this file only.

    Attributes:
        micro_batch_size: the most samples in a micro-batch.
        split: the user's own splitter.
        whole: batches can't be split at all: their structure does not allow it.
        unsplittable: why the loss can't be split, once that is known; else empty.
        held: the batch at hand is not split: as a whole it has no loss, nothing in it counts, or it is not finite.
        skipped: a trial has shown that; its forward needs no graph.
        misfit: why the batch at hand can't be split, where its structure does not allow it; else empty.
        combination: how the loss comes from the micro-batches'.
        unlike: terms of the loss may weigh unlike. Their values are noted, and the reported loss is put together from
            them.
        row_tokens: the length of the worst batch's rows, where micro-batches of a padded batch are formed by tokens:
            short rows together, without padding, `micro_batch_size` times so many tokens in a micro-batch.
        wide: the tensors that are as wide as the mask, and were shown to go without padding.
        fewest: the fewest samples that the step runs on (batch normalization fails on one). No micro-batch holds less,
            though one may then hold more than `micro_batch_size`.
        chunk_rows: the most rows in a chunk of a module, where batches run whole and modules in chunks; else None.
        chunk_tokens: the most tokens in a chunk of a module, where one row does not fit otherwise; else None.
    """

    micro_batch_size: int
    split: Splitter | None = None
    whole: bool = field(default=False, init=False)
    unsplittable: str = field(default="", init=False)
    held: bool = field(default=False, init=False)
    skipped: bool = field(default=False, init=False)
    misfit: str = field(default="", init=False)
    combination: Combination = field(default_factory=Combination, init=False)
    unlike: bool = field(default=False, init=False)
    _notes_values: bool = field(default=False, init=False)
    row_tokens: int | None = field(default=None, init=False)
    wide: frozenset[str] = field(default=frozenset(), init=False)
    fewest: int = field(default=1, init=False)
    chunk_rows: int | None = field(default=None, init=False)
    chunk_tokens: int | None = field(default=None, init=False)
    _surveys_each: bool = field(default=False, init=False)
    _counts_nothing: int | None = field(default=None, init=False)
    _has_lone: range = field(default=range(0), init=False)

    # What changes it

    def never_split(self, why: str) -> None:
        """Run all batches whole from here on: their structure can't be split."""
        self.whole, self.unsplittable = True, why

    def stop_splitting(self, why: str) -> None:
        """Remember that the loss can't be split; the size is set by `resize`."""
        self.unsplittable = why

    def resize(self, micro_batch_size: int) -> None:
        """Put at most so many samples into a micro-batch."""
        self.micro_batch_size = micro_batch_size

    def combine_by(self, combination: Combination, *, held: bool, unlike: bool) -> None:
        """Take over what the proof has found out.

        Args:
            combination: how the loss comes from those of micro-batches.
            held: the batch at hand is not split.
            unlike: terms of the loss weigh unlike; once true, it stays so.
        """
        self.combination, self.held, self.skipped = combination, held, False
        self.unlike = self.unlike or unlike

    def fit(self, misfit: str) -> None:
        """Run the batch at hand whole for this reason; split it where the reason is empty."""
        self.misfit, self.skipped = misfit, False  # the batch before may have been skipped

    def skip_batch(self) -> None:
        """Run the batch at hand whole and without a graph, as the step returns None for it."""
        self.held = self.skipped = True

    def note_values(self, *, in_window: bool = False) -> None:
        """Note the values of the loss's terms from here on, and put the reported loss together from them.

        Args:
            in_window: several loader batches are weighed as one (`effective_batch_size`). Then values only tell which
                terms count something; the reported loss stays a mean of losses, and terms that weigh unlike are
                refused.
        """
        self._notes_values, self.unlike = True, self.unlike or not in_window

    def survey_each_batch(self) -> None:
        """Read the terms' totals off a forward before each batch of which nothing tells them.

        Its micro-batches are scaled by them.
        """
        self._surveys_each = self.unlike = True

    def survey_batch(self, batch_idx: int) -> None:
        """Survey this batch, in which nothing may count at all."""
        self._counts_nothing = batch_idx

    def look_up_in(self, batches: range) -> None:
        """Survey these batches, in which a divisor may be no count."""
        self._has_lone = batches

    def form_by_tokens(self, row_tokens: int, wide: frozenset[str]) -> None:
        """Put short rows together, `micro_batch_size * row_tokens` tokens in a micro-batch."""
        self.row_tokens, self.wide = row_tokens, wide

    def form_by_rows(self) -> None:
        """Split into runs of rows, padding included."""
        self.row_tokens = None

    def run_in_chunks(self, rows: int | None, tokens: int | None = None) -> None:
        """Run modules in chunks of at most so many rows, where batches are whole, and of so many tokens of each."""
        self.chunk_rows, self.chunk_tokens = rows, tokens

    def resize_finest(self, size: int) -> None:
        """Resize what is split the finest: chunks of tokens, of rows, or micro-batches."""
        if self.chunk_tokens is not None:
            self.chunk_tokens = size
        elif self.chunk_rows is not None:
            self.chunk_rows = size
        else:
            self.micro_batch_size = size

    def need_rows(self, fewest: int) -> None:
        """Put at least so many samples into a micro-batch."""
        self.fewest = fewest

    @property
    def finest(self) -> int:
        """The size of what is split the finest (see `resize_finest`)."""
        return self.chunk_tokens or self.chunk_rows or self.micro_batch_size

    @property
    def in_chunks(self) -> bool:
        """Whether modules run in chunks of rows or of tokens."""
        return self.chunk_rows is not None or self.chunk_tokens is not None

    @property
    def form(self) -> Form:
        """The sizes: `formed` splits the same way again."""
        return self.micro_batch_size, self.row_tokens, self.chunk_rows, self.chunk_tokens

    @contextmanager
    def formed(self, form: Form) -> Iterator[None]:
        """A context in which batches are split as they were when `form` was read."""
        now = self.form
        self._take(form)
        try:
            yield
        finally:
            self._take(now)

    def _take(self, form: Form) -> None:
        self.micro_batch_size, self.row_tokens, self.chunk_rows, self.chunk_tokens = form

    # What it tells

    @property
    def notes_values(self) -> bool:
        """Whether the values of the loss's terms are noted: they weigh unlike, or what they count depends on them."""
        return self.unlike or self._notes_values

    @property
    def keeps_whole(self) -> bool:
        """Whether the batch at hand is not split, whatever its size."""
        return self.whole or self.held or bool(self.misfit)

    @property
    def why_whole(self) -> str:
        """Why the batch at hand can't be split; empty where it can."""
        untold = (
            "As a whole it has no loss, nothing in it counts, or its gradients are not finite: how its loss splits "
            "can't be proven."
        )
        return self.unsplittable or self.misfit or (untold if self.held else "")

    def looks_up(self, batch_idx: int) -> bool:
        """Whether divisors in the whole batch are looked up before it runs, as its micro-batches need them."""
        rules, foretold = self.combination.rules, self.combination.foretold
        sums = rules.looked_up if rules is not None else ()
        return batch_idx in self._has_lone or not all(map(foretold.is_constant, sums))

    def surveys(self, batch_idx: int, *, is_told: bool) -> bool:
        """Whether the batch that begins a window is surveyed before it runs.

        Args:
            batch_idx: the batch's number.
            is_told: numbers of the batch tell the totals of its loss's terms.
        """
        return self._counts_nothing == batch_idx or (self._surveys_each and not is_told)

    def cut(self, batch: Any) -> Cut:
        """The micro-batches of a batch."""
        if self.keeps_whole:
            return Cut(parts=[batch], sizes=[1])
        sizes = even_sizes(batch_size(batch), self.micro_batch_size, self.fewest)
        if len(sizes) == 1:
            return Cut(parts=[batch], sizes=sizes)
        by_tokens = self._cut_by_tokens(batch)
        return by_tokens or Cut(parts=split_batch(batch, sizes, split=self.split), sizes=sizes)

    def _cut_by_tokens(self, batch: Any) -> Cut | None:
        """Micro-batches by tokens, where that computes a tenth less of padding, or the same in fewer of them."""
        if self.row_tokens is None or self.split is not None or self.fewest > 1:
            return None
        extent = extent_of(batch)
        if extent is None or not self.wide <= wide_tensors(batch):
            return None
        places = parts_by_tokens(extent, self.micro_batch_size * self.row_tokens)
        rows = batch_size(batch)
        saves = sum(place.tokens for place in places) < _LESS_PADDING * rows * extent.columns
        if not saves and len(places) >= -(-rows // self.micro_batch_size):
            return None
        if not cuts_padding_alone(batch, places, self.wide):
            return None
        parts = [take_part(batch, place, self.wide) for place in places]
        return Cut(
            parts=parts, sizes=[len(place.rows) for place in places], places=places, columns=extent.columns
        )
