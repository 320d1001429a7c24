"""Tests whether packed documents see each other, by changing some documents' tokens and watching the others.

It runs twice: the tokens of the even documents change while the odd ones are watched, and vice versa. So a
document is watched while both its neighbours, the padding and the other rows change. It watches the outputs
of all modules that hold tokens of the batch, the inputs of the innermost ones, and the loss with the labels
of the watched documents alone.
"""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_memkit.attention.adapters import outermost_models
from lightning_memkit.attention.documents import numbers_of
from lightning_memkit.attention.hugging_face import NAME, is_transformers_model, refusal_of
from lightning_memkit.attention.token_watch import Change, TokenWatch, first_change
from lightning_memkit.data.batching.batch import IGNORED_LABEL, PackedBatch
from lightning_memkit.micro_batching.changes.rollback import Rollback
from lightning_memkit.utilities.errors import NoEffectWarning

Run = Callable[[Any], Any]
Agree = Callable[[bool], bool]

PROBED_ROWS = 2
# Relative to the loss; a larger difference is not rounding. Kernels compute the same bits for a watched
# document, but experts that get other numbers of tokens round differently.
_LOSS_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
_COARSE_LOSS_TOLERANCE = 1e-2


class ContaminationError(ValueError):
    """Documents packed into a row see each other."""


@dataclass(frozen=True, kw_only=True)
class Leak:
    """Where a document was first seen to change with other documents' tokens.

    Args:
        where: The module whose output changed, or a description of what else changed.
        document: The changed document's row, and its begin and end in the row.
        share: The size of the change, relative to that in the documents whose tokens were changed.
    """

    where: str
    document: tuple[int, int, int]
    share: float = 0.0


def probe_contamination(
    model: nn.Module,
    batch: PackedBatch,
    run: Run | None = None,
    *,
    agree: Agree = bool,
    evaluates: bool = False,
) -> bool:
    """Raise if packed documents see each other; costs four forwards of two rows, and leaves no trace.

    The model runs without dropout and gradients. Buffers, metrics, random states and its mode are restored.

    Args:
        model: Any module.
        batch: A packed batch on the model's device.
        run: Runs the model on a batch; it returns a loss, a mapping or an object with one, or None. Default:
            ``model.training_step(batch, 0)`` if the model has one, else ``model(**batch)``.
        agree: Whether something holds on at least one rank, so that ranks make equal numbers of forwards.
        evaluates: `run` is a step of an evaluation: what the model does in training does not matter.

    Returns:
        Whether there was anything to test: a row with two documents, and a model in which tokens can be
        followed.

    Raises:
        ContaminationError: Documents see each other; it names the first module that shows it, and the remedy.
    """
    rows = probed_rows(batch)
    if not agree(rows is not None):
        return False
    # A rank without a row of two documents runs along with the others.
    rows = batch.split([1, batch.rows - 1][: batch.rows])[0] if rows is None else rows
    probe = _Probe(model, run or _own_step(model), rows, agree)
    with torch.no_grad():
        try:
            leak = probe.find(evaluating=True)
            in_evaluation = leak
            if agree(leak is not None) and not evaluates:
                # Some models keep documents apart in one mode only: transformers disables its cache in
                # training with activation checkpointing.
                leak = probe.find(evaluating=False)
        finally:
            probe.restore()
    if agree(leak is not None):
        raise ContaminationError(_message(leak, model))
    if in_evaluation is not None:
        warnings.warn(
            f"In training documents are kept apart, but in evaluation they see each other, first in "
            f"{in_evaluation.where}: validation measures something else. {_remedy(model)}",
            stacklevel=2,
        )
    if not agree(probe.has_seen):
        warnings.warn(
            f"{type(model).__name__} could not be probed for contamination: no module's output has a place for every "
            'token, and no loss was returned for a batch with "labels". Nothing is known about its attention.',
            NoEffectWarning,
            stacklevel=2,
        )
        return False
    return True


def probed_rows(batch: PackedBatch, count: int = PROBED_ROWS) -> PackedBatch | None:
    """The consecutive rows that hold the most documents; None if no row has two: padding follows all documents."""
    begins = batch["cu_seqlens"][:-1].long()
    if "position_ids" in batch:
        begins = begins[batch.are_documents()]
    counts = torch.bincount(begins.cpu() // batch.length, minlength=batch.rows)
    if int(counts.max()) < 2:
        return None
    taken = min(count, batch.rows)
    first = int(counts.unfold(0, taken, 1).sum(1).argmax())
    sizes = [first, taken, batch.rows - taken - first]
    return batch.split([size for size in sizes if size])[1 if first else 0]


def _own_step(model: nn.Module) -> Run:
    step: Any = getattr(model, "training_step", None)
    return (lambda batch: model(**batch)) if step is None else (lambda batch: step(batch, 0))


class _Probe:
    """Runs a batch with some tokens changed, always from the same state."""

    def __init__(self, model: nn.Module, run: Run, batch: PackedBatch, agree: Agree) -> None:
        self.model, self.run, self.batch, self.agree = model, run, batch, agree
        self._rollback = Rollback(model)
        self._hooks = [(hooks, hooks.copy()) for module in model.modules() for hooks in _hooks_of(module)]
        self.numbers = numbers_of(batch["cu_seqlens"].to(batch["input_ids"].device), batch.rows, batch.length)
        begins = batch["cu_seqlens"][:-1].long()
        self.is_document = torch.ones_like(self.numbers, dtype=torch.bool)
        if "position_ids" in batch:
            self.is_document = batch["position_ids"].flatten()[begins][self.numbers] == 0
        self.other_tokens = _next_value(batch["input_ids"])
        self.has_seen = False
        self.evaluating = True

    def restore(self) -> None:
        """Restore everything, including hooks: transformers adds some in a forward and notes it in an attribute."""
        self._rollback.restore()
        for hooks, kept in self._hooks:
            if hooks != kept:
                hooks.clear()
                hooks.update(kept)

    def find(self, *, evaluating: bool) -> Leak | None:
        """The first document that changes with others, in one of the two modes."""
        self.evaluating = evaluating
        found = [self._changing(self.numbers % 2 == parity) for parity in (0, 1)]
        return next((leak for leak in found if leak is not None), None)

    def _changing(self, changed: Tensor) -> Leak | None:
        """Change some documents' tokens; the first other document that changes with them."""
        kept = ~changed & self.is_document
        labels = self._labels(kept)
        before, loss_before = self._once(self.batch["input_ids"], labels)
        tokens = torch.where(changed, self.other_tokens, self.batch["input_ids"])
        after, loss_after = self._once(tokens, labels)
        self.has_seen |= bool(before.seen) or (loss_before is not None and labels is not None)
        change = first_change(before, after, kept.flatten(), changed.flatten())
        if self.agree(change is not None):
            if change is None:  # another rank found one
                return None
            place = self._document(change.place)
            return Leak(where=self._described(change), document=place, share=change.share)
        if self.agree(_differ(loss_before, loss_after)) and self._loss_leaks(tokens, labels):
            return Leak(
                where=self._where_loss_leaks(kept),
                document=self._document(int(kept.flatten().int().argmax())),
            )
        return None

    def _loss_leaks(self, tokens: Tensor, labels: Tensor | None) -> bool:
        """Whether the loss of the watched labels changes, and not an added term such as experts' balance."""
        others = None if labels is None else torch.where(labels == IGNORED_LABEL, labels, _next_value(labels))
        (own, other), (own_then, other_then) = (
            [self._once(ids, each)[1] for each in (labels, others)]
            for ids in (self.batch["input_ids"], tokens)
        )
        if own is None or other is None or own_then is None or other_then is None:
            return False
        scale = max(abs(float(own)), abs(float(other)))
        return abs(float((own - other) - (own_then - other_then))) > _tolerance(own) * scale

    def _once(self, tokens: Tensor, labels: Tensor | None) -> tuple[TokenWatch, Tensor | None]:
        """Run the batch once with these tokens and labels; the modules' outputs and the loss."""
        self.restore()
        if self.evaluating:
            self.model.eval()
        batch = PackedBatch({**self.batch, "input_ids": tokens})
        if labels is not None:
            batch["labels"] = labels
        with (
            TokenWatch(self.model, self.batch.rows, self.batch.length) as watch,
            self._rollback.watching(),  # a step may change weights, such as a teacher's
        ):
            output = self.run(batch)
        return watch, _loss_of(output)

    def _labels(self, kept: Tensor) -> Tensor | None:
        labels = self.batch.get("labels")
        return labels.masked_fill(~kept, IGNORED_LABEL) if isinstance(labels, Tensor) else None

    def _document(self, place: int) -> tuple[int, int, int]:
        row, numbers = place // self.batch.length, self.numbers.flatten()
        places = (numbers == numbers[place]).nonzero().flatten() - row * self.batch.length
        return row, int(places[0]), int(places[-1]) + 1

    def _described(self, change: Change) -> str:
        """The module's path and class."""
        kind = type(self.model.get_submodule(change.path)).__name__
        return f"the {'input' if change.is_input else 'output'} of {change.path or 'the model'} ({kind})"

    def _where_loss_leaks(self, kept: Tensor) -> str:
        firsts = self.batch["cu_seqlens"][:-1].long()
        inside = firsts[firsts % self.batch.length != 0]
        labels = self._labels(kept)
        if labels is not None and bool((labels.flatten()[inside] != IGNORED_LABEL).any()):
            return (
                "the loss: the label of a document's first token counts, and the document before it has to predict "
                f"it (set it to {IGNORED_LABEL})"
            )
        return "the loss, behind the last module whose output could be watched"


def _hooks_of(module: nn.Module) -> list[Any]:
    return [
        hooks
        for name, hooks in vars(module).items()
        if name.startswith(("_forward_hooks", "_forward_pre_hooks"))
    ]


def _message(leak: Leak | None, model: nn.Module) -> str:
    if leak is None:
        return (
            f"Packed documents see each other on another rank, whose error names the place. {_remedy(model)}"
        )
    row, begin, end = leak.document
    share = f", {leak.share:.2g} times as much as those" if leak.share else ""
    return (
        f"Packed documents see each other: tokens {begin} to {end - 1} of row {row} change with other "
        f"documents{share}. First seen in {leak.where}. {_remedy(model)}"
    )


def _remedy(model: nn.Module) -> str:
    theirs: list[Any] = [module for module in model.modules() if is_transformers_model(module)]
    if not theirs:
        remedy = "Hand cu_seqlens to the model's attention, and let it call lightning_memkit.packed_attention"
    elif str(theirs[0].config._attn_implementation).startswith(NAME):
        remedy = "Hand the transformers model the whole batch, model(**batch): it is not told cu_seqlens"
    elif (refused := next(filter(None, map(refusal_of, outermost_models(model))), None)) is not None:
        # What can't be followed is not named as a remedy.
        return f'{refused.reason}: give each document its own row, packing="none" (data.init_args.packing: none).'
    else:
        remedy = (
            "Call lightning_memkit.attention.use_packed_attention(model) once the model is built, and hand it the "
            "whole batch, model(**batch)"
        )
    return f'{remedy}; or give each document its own row: packing="none".'


def _next_value(values: Tensor) -> Tensor:
    """Replace each value by another one that the tensor holds; ignored labels are not used."""
    known = values[values != IGNORED_LABEL].unique()
    if len(known) < 2:
        return torch.where(values == 0, values + 1, values - 1)
    return known[(torch.searchsorted(known, values.contiguous()) + 1) % len(known)]


def _loss_of(output: Any) -> Tensor | None:
    """The loss in a step's result; None if there is none or it is not finite."""
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", output)
    if not isinstance(found, Tensor) or found.numel() != 1 or not bool(found.isfinite()):
        return None
    return found.detach().reshape(())


def _tolerance(loss: Tensor) -> float:
    return _LOSS_TOLERANCE.get(loss.dtype, _COARSE_LOSS_TOLERANCE)


def _differ(before: Tensor | None, after: Tensor | None) -> bool:
    if before is None or after is None:
        return False
    return abs(float(before - after)) > _tolerance(before) * abs(float(before))
