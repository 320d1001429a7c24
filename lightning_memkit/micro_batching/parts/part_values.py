"""Join what micro-batches log and return; in doubt, run two of them as one to learn how values add up."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from torch import Tensor

from lightning_memkit.micro_batching import SplittableBatch
from lightning_memkit.micro_batching.parts.cut import Cut, Splitter, rows_together
from lightning_memkit.micro_batching.parts.facets import Facets, facets_of, telling_first
from lightning_memkit.micro_batching.parts.logged_entries import Entries
from lightning_memkit.micro_batching.parts.logged_values import LoggedValues
from lightning_memkit.micro_batching.parts.returned_values import ReturnedValues
from lightning_memkit.micro_batching.parts.value_looks import ValueLooks
from lightning_memkit.micro_batching.parts.whole_values import OfWhole
from lightning_memkit.micro_batching.proof.trial_values import TrialValues
from lightning_memkit.micro_batching.run import Step

_MOST_LOOKS = 8  # at pairs of a batch's micro-batches; and, in a fit, looks that give nothing before they end
_LOOKS_IF_UNSURE = 6  # if the remaining rules agree on this batch, but may fit by chance


@dataclass(kw_only=True)
class GivenValues:
    """What the micro-batches of a batch have logged and returned.

    Attributes:
        extras: what each micro-batch with a loss returned besides it.
        weights: the weights of these in the loss.
        sizes: their numbers of rows.
        parts: their indices among the micro-batches.
        rows: the batch's rows that they hold, if these are out of order.
        logged: the weight of each micro-batch, and what it logged.
        parts_logged: the indices of these among the micro-batches.
        cut: the batch in micro-batches.
        split: the user's own function that splits a batch, if there is one.
    """

    extras: list[dict[str, Any]] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    parts: list[int] = field(default_factory=list)
    rows: list[int] | None = None
    logged: list[tuple[float, Entries]] = field(default_factory=list)
    parts_logged: list[int] = field(default_factory=list)
    cut: Cut | None = None
    split: Splitter | None = None

    @property
    def sizes_logged(self) -> list[int]:
        """The numbers of rows of the micro-batches in `logged`."""
        return [] if self.cut is None else [self.cut.sizes[index] for index in self.parts_logged]


class PartValues:
    """Joins what micro-batches log and return.

    Attributes:
        logs: joins logged values.
        returned: joins returned values.
        look: runs two micro-batches as one; None on several ranks, or after it has failed too often. Then
            doubtful values cause a warning.
        of_whole: what the batch at hand has returned as a whole, if it has run so, too.
        seconds: the time that looks have taken.
    """

    def __init__(self) -> None:
        self.of_whole: OfWhole | None = None
        self.logs = LoggedValues()
        self.returned = ReturnedValues()
        self.look: ValueLooks | None = None
        self.seconds = 0.0
        self._failed = 0  # looks that gave no comparison

    def of_batch(
        self,
        step: Step,
        given: GivenValues,
        shares: Sequence[float],
        known: Collection[tuple[str, str]],
        known_returned: Collection[str] = (),
    ) -> tuple[Entries, dict[str, Any]]:
        """What the batch logs, and what it returns besides its loss.

        Args:
            step: the batch's step, after its backward.
            given: what its micro-batches logged and returned.
            shares: the weights of the micro-batches that have a loss.
            known: hooks and names of logged values that equal the loss in every micro-batch.
            known_returned: names of returned values that do; the caller joins those that are the loss, see `losses`.
        """
        joined = self._settled(step, given, shares, known, known_returned)
        if self._compared_again(step, given):
            del joined  # two copies of returned rows could exceed the budget
            joined = self._settled(step, given, shares, known, known_returned)
        if self.of_whole is not None:
            for name in self.of_whole.unlike(joined[1]):
                self.returned.warn(name)
            self.of_whole = None
        return joined

    def _settled(
        self,
        step: Step,
        given: GivenValues,
        shares: Sequence[float],
        known: Collection[tuple[str, str]],
        known_returned: Collection[str],
    ) -> tuple[Entries, dict[str, Any]]:
        """Join the values; where a rule is open, look at pairs of micro-batches until it is settled."""
        tried: set[tuple[int, int]] = set()
        for look in range(_MOST_LOOKS + 1):
            entries = self.logs.merged(given.logged, given.sizes_logged, known)
            extra: dict[str, Any] = {}
            if given.extras:
                extra = self.returned.merged(given.extras, shares, given.sizes, given.rows, known_returned)
            doubtful, unsure = bool(self.logs.doubtful or self.returned.doubtful), self._unsure
            if not doubtful and (look >= _LOOKS_IF_UNSURE or not unsure):
                break
            if look < _MOST_LOOKS and self._looked(step, given, tried):
                continue
            if doubtful:
                self.logs.give_up()
                self.returned.give_up()
            break
        return entries, extra

    def _compared_again(self, step: Step, given: GivenValues) -> bool:
        """Compare all rules again where a micro-batch is peculiar in a way that no comparison has met."""
        cut, parts = given.cut, given.parts_logged
        if cut is None or len(parts) < 2 or not (self.logs.varying or self.returned.varying):
            return False
        weights = [weight for weight, _ in given.logged]
        facets = [facets_of(cut.parts[part], weight) for part, weight in zip(parts, weights, strict=True)]
        is_first = not self.logs.seen  # the probe has compared rows of this batch, chosen to differ
        new = telling_first(facets, self.logs.seen)
        for index in new[:_MOST_LOOKS]:
            if not facets[index] - self.logs.seen:
                continue  # the look before has met it
            beside = self._beside(step, given, index, facets)
            pair = (parts[min(index, beside)], parts[max(index, beside)])
            if self._looked_at(step, given, pair):
                self.logs.seen.update(facets[index] | facets[beside])
            elif (
                self.look is None or not self.look.ran_out
            ):  # else a later micro-batch like this is looked at
                self.logs.seen.update(facets[index])
                if not is_first:
                    self._give_up_rules()
        return bool(new)

    def _beside(self, step: Step, given: GivenValues, index: int, facets: Sequence[Facets]) -> int:
        """The micro-batch to run as one with a peculiar one: a neighbour, or the most ordinary one that counts."""
        if self._adjacent(step, given):
            return index - 1 if index else 1
        others = [other for other in range(len(facets)) if other != index]
        return min(
            others, key=lambda other: (not given.logged[other][0], len(facets[other] - self.logs.seen))
        )

    def _give_up_rules(self) -> None:
        """Warn of all values that are joined by a rule, since it can't be compared again."""
        self.logs.doubtful, self.returned.doubtful = self.logs.varying, self.returned.varying
        self.logs.give_up()
        self.returned.give_up()
        self.logs.varying, self.returned.varying = [], []

    @staticmethod
    def _adjacent(step: Step, given: GivenValues) -> bool:
        """Whether only neighbours can be run as one."""
        return given.split is not None or isinstance(step.batch, SplittableBatch)

    @property
    def _unsure(self) -> bool:
        """Whether some rules rest on too few comparisons, and a look is possible."""
        return self.look is not None and bool(self.logs.unsure or self.returned.unsure)

    def _looked(self, step: Step, given: GivenValues, tried: set[tuple[int, int]]) -> bool:
        """Run two micro-batches that were not `tried` as one; whether that gave a comparison of values."""
        adjacent = self._adjacent(step, given)
        places = given.parts_logged
        pair = self.logs.telling_pair(
            given.logged, given.sizes_logged, adjacent=adjacent, but=_among(tried, places)
        )
        if pair is None and given.extras:
            places = given.parts
            pair = self.returned.telling_pair(
                given.extras, given.weights, given.sizes, adjacent=adjacent, but=_among(tried, places)
            )
        if pair is None or self.look is None or given.cut is None:
            return False
        first, second = (places[index] for index in pair)
        tried.add((first, second))
        return self._looked_at(step, given, (first, second))

    def _looked_at(self, step: Step, given: GivenValues, pair: tuple[int, int]) -> bool:
        """Run two micro-batches as one; whether that gave a comparison of values."""
        if self.look is None or given.cut is None:
            return False
        (first, second), adjacent, started = pair, self._adjacent(step, given), perf_counter()
        weights = {part: weight for part, (weight, _) in zip(given.parts_logged, given.logged, strict=True)}
        shares, sizes = [weights[first], weights[second]], [given.cut.sizes[first], given.cut.sizes[second]]
        together = rows_together(step.batch, given.cut, given.split, first, second, adjacent=adjacent)
        runs = None if together is None else self.look(step, *together, sizes)
        told = runs is not None and self._learned(runs, shares, sizes)
        self.seconds += perf_counter() - started
        self._failed += not told
        if (
            self._failed >= _MOST_LOOKS
        ):  # the step draws random numbers of its own, logs only once, or two micro-batches don't fit
            self.look = None
        return told

    def _learned(self, runs: Sequence[TrialValues], shares: Sequence[float], sizes: Sequence[int]) -> bool:
        whole, *parts = runs
        self.note_losses(whole.loss, [part.loss for part in parts], whole.logged, whole.returned)
        told = self.logs.learn(whole.logged, [part.logged for part in parts], shares, sizes)
        return self.returned.learn(whole.returned, [part.returned for part in parts], shares, sizes) or told

    def note_losses(
        self, loss: Tensor, losses_apart: Sequence[Tensor], logged: Entries, returned: Mapping[str, Any]
    ) -> None:
        """Note which values are the loss, of rows that were run as one; see `LossNames.note`."""
        self.logs.note_loss(loss, losses_apart, logged)
        self.returned.loss_names.note(loss, losses_apart, returned.items())


def _among(tried: set[tuple[int, int]], parts: Sequence[int]) -> set[tuple[int, int]]:
    """Pairs of micro-batches, translated to indices among those in `parts`."""
    place = {part: index for index, part in enumerate(parts)}
    return {(place[a], place[b]) for a, b in tried if a in place and b in place}
