"""The memory of training computed by rules of thumb, compared with a prediction."""

from dataclasses import dataclass

from torch import nn

from lightning_memkit.memory.anatomy import CATEGORIES, Anatomy
from lightning_memkit.memory.units import format_bytes
from lightning_memkit.prediction.by_hand import Blocks, ParameterCounts, Recipe, Term, VocabularyHead
from lightning_memkit.prediction.result import Prediction
from lightning_memkit.utilities.columns import aligned

_CLOSE, _SMALL = 0.01, 1 << 20  # what counts as agreement: relative, or in bytes


@dataclass(frozen=True, kw_only=True)
class FormRow:
    """A category by hand and as predicted, in bytes; `why` explains the difference, if there is one."""

    name: str
    by_hand_bytes: int
    predicted_bytes: int
    why: str = ""

    @property
    def difference_bytes(self) -> int:
        """Predicted bytes minus those by hand."""
        return self.predicted_bytes - self.by_hand_bytes


@dataclass(frozen=True, kw_only=True)
class FormComparison:
    """A calculation by hand next to a prediction, by category; prints as a table."""

    rows: tuple[FormRow, ...]

    @property
    def total(self) -> FormRow:
        """The sums; the predicted one is what the device must provide."""
        return FormRow(
            name="total",
            by_hand_bytes=sum(row.by_hand_bytes for row in self.rows),
            predicted_bytes=sum(row.predicted_bytes for row in self.rows),
        )

    def __str__(self) -> str:
        cells: list[tuple[str, ...]] = [("", "by hand", "predicted", "difference", "why")]
        for row in (*self.rows, self.total):
            sizes = map(format_bytes, (row.by_hand_bytes, row.predicted_bytes, row.difference_bytes))
            cells.append((row.name, *sizes, row.why))
        return aligned(cells, right=(1, 2, 3))


@dataclass(frozen=True, kw_only=True)
class ClosedForm:
    """A calculation by hand, term by term; prints as a table.

    Attributes:
        terms: the terms with their formulas; those of 0 bytes are left out.
    """

    terms: tuple[Term, ...]

    @property
    def total_bytes(self) -> int:
        """The sum of all terms as if all existed at once, which may exceed the actual peak."""
        return sum(term.size_bytes for term in self.terms)

    def category_bytes(self, category: str) -> int:
        """The sum of a category's terms.

        Raises:
            KeyError: there is no such category.
        """
        if category not in CATEGORIES:
            raise KeyError(f"category={category!r} is none of {', '.join(CATEGORIES)}.")
        return sum(term.size_bytes for term in self.terms if term.category == category)

    def beside(self, prediction: Prediction) -> FormComparison:
        """Compare each category at the predicted peak with its value by hand, and explain differences."""
        anatomy, rows = prediction.anatomy, []
        for category in CATEGORIES:
            by_hand = self.category_bytes(category)
            rows.append(
                FormRow(
                    name=category.replace("_", " "),
                    by_hand_bytes=by_hand,
                    predicted_bytes=anatomy.at_peak.get(category, 0),
                    why=_why(category, by_hand, anatomy),
                )
            )
        library, context = prediction.library_bytes, anatomy.fixed_bytes
        cache = max(prediction.reserved_bytes - library - prediction.peak_bytes, 0)
        rows += (
            FormRow(name=name, by_hand_bytes=0, predicted_bytes=size, why=why)
            for name, size, why in (
                ("allocator", cache, "reserved in whole segments, more than what is alive"),
                ("matrix library", library, "workspaces, one for forward and one for backward"),
                ("device", context, "the context, outside of the allocator"),
            )
        )
        return FormComparison(rows=tuple(row for row in rows if row.by_hand_bytes or row.predicted_bytes))

    def __str__(self) -> str:
        rows = [(term.name, term.formula, format_bytes(term.size_bytes), term.source) for term in self.terms]
        total = ("total", "", format_bytes(self.total_bytes), "")
        return aligned([("", "formula", "bytes", "source"), *rows, total], right=(2,))


def closed_form(
    parameters: ParameterCounts | nn.Module,
    *,
    recipe: Recipe | None = None,
    blocks: Blocks | None = None,
    head: VocabularyHead | None = None,
    inputs_bytes: int = 0,
) -> ClosedForm:
    """The memory of training by rules of thumb, term by term; for inference, freeze all parameters.

    Args:
        parameters: their counts, or a module in which to count them.
        recipe: what is kept for each parameter; None for float32 with AdamW, 16 bytes.
        blocks: a transformer's blocks; None for no activations.
        head: logits over a vocabulary; None for none.
        inputs_bytes: bytes of the batch.

    Raises:
        ValueError: a negative number of bytes.
    """
    if inputs_bytes < 0:
        raise ValueError(f"inputs_bytes={inputs_bytes} is negative; write 0 to leave the batch out.")
    if isinstance(parameters, nn.Module):
        parameters = ParameterCounts.of(parameters)
    terms = [*(recipe or Recipe()).terms(parameters)]
    for part in (blocks, head):
        terms += () if part is None else part.terms()
    terms.append(Term(category="inputs", name="batch", formula=f"{inputs_bytes:,}", size_bytes=inputs_bytes))
    return ClosedForm(terms=tuple(term for term in terms if term.size_bytes))


def _why(category: str, by_hand: int, anatomy: Anatomy) -> str:
    at_peak, phase = anatomy.at_peak.get(category, 0), anatomy.peak_phase
    if _agree(at_peak, by_hand):
        return ""
    if category == "temporaries":
        if phase == "optimizer":
            at_once = ", lists of parameters at once" if "_foreach" in anatomy.peak_operator else ""
            return f"made and freed within the optimizer's step{at_once}"
        return f"the peak is in the {phase}, at {anatomy.peak_operator}"
    if at_peak < by_hand and _agree(anatomy.largest.get(category, 0), by_hand):
        return f"all there at another moment; the peak is in the {phase}"
    reasons = {
        "weights": "buffers, and parameters of other sizes",
        "gradients": f"the peak is in the {phase}, where not all of them exist",
        "optimizer_states": "step counts, scales of 8-bit states, or states that are made later",
        "saved_activations": f"at most {format_bytes(anatomy.largest.get(category, 0))} in the step: other layers, "
        f"or kernels that keep other tensors; the peak is in the {phase}",
    }
    return reasons.get(category, "no rule counts it")


def _agree(one: int, other: int) -> bool:
    return abs(one - other) <= max(_CLOSE * max(one, other), _SMALL)
