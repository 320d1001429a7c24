"""The texts for batches that may not be split: the cause, and the remedy."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import isfinite
from traceback import clear_frames
from typing import Protocol

from torch import Tensor

from lightning_memkit.micro_batching import WeighBy, Weigher, normalized
from lightning_memkit.micro_batching.changes.step_changes import StepChange
from lightning_memkit.micro_batching.graph.loss_rules import VARYING_FACTOR, LossRules
from lightning_memkit.micro_batching.proof import decomposability
from lightning_memkit.micro_batching.proof.comparison import Miss
from lightning_memkit.micro_batching.proof.decomposability import Verdict
from lightning_memkit.micro_batching.run import Run
from lightning_memkit.micro_batching.shares.foreseen import (
    ForeseenWronglyError,
    HookStateError,
    KeptConstantError,
    ManyRowsError,
    ManyRowsStateError,
    PartSkippedError,
    VaryingFactorError,
    WholeTermsError,
)

_SIZE = "micro_batch_size = the loader's batch size"
_WHOLE = f"keep the batch whole ({_SIZE})"
_WHOLE_AND_FIT = f"keep the batch whole ({_SIZE}; ActivationCheckpointing helps it to fit)"

AFTER_GRADIENT = ", after its gradient"  # ends the name of a hook on complete gradients
DRAWS_BY_ROWS = "training_step draws from Python's or NumPy's generators, more often for some rows"


WITHIN_MODULES = Verdict(
    adds_up=False,
    relative_error=0.0,
    cause='within="modules" keeps them whole',
    remedy='write within="auto", which splits where that is proven',
)


def scaled_by(shown: str) -> Verdict:
    """A micro-batch's loss has shown, by a factor, that rows act on each other."""
    return _refused(
        f"the samples of a batch act on each other in the loss, which is scaled by {shown}",
        f"{_WHOLE_AND_FIT}, or pass split= so that each micro-batch holds a complete group",
    )


def fails_on_parts(cause: Exception) -> Verdict:
    """The step fails on a micro-batch; the whole batch may run, if it needs a certain number of samples."""
    clear_frames(cause.__traceback__)
    verdict = _refused(
        f"training_step fails on a micro-batch ({type(cause).__name__}: {cause})",
        f"{_WHOLE}, or pass split=",
    )
    return replace(verdict, failure=cause)


def shown_by(error: ForeseenWronglyError) -> Verdict | None:
    """The verdict on a loss that a micro-batch has shown not to add up; None for errors that don't settle it."""
    if isinstance(error, KeptConstantError):
        return constant_beside_a_kept_mean()
    if isinstance(error, ManyRowsError):
        return _refused(
            f"the samples of a batch act on each other where there are many (training_step has {error}): an expert's "
            "capacity, or a choice among all rows",
            _WHOLE_AND_FIT,
            error.relative_error,
        )
    if isinstance(error, ManyRowsStateError):
        return changes_in_parts([StepChange(kind="attribute", name=name) for name in sorted(error.names)])
    if isinstance(error, HookStateError):
        return _refused(
            f"{error}: micro-batches after the first would see it changed, and the whole batch would not",
            f"{_WHOLE_AND_FIT}, or change it in on_train_batch_end",
            0.0,
        )
    if isinstance(error, PartSkippedError):
        return skips_parts()
    if isinstance(error, WholeTermsError):
        return _refused(
            f"the whole batch's loss has terms or divisors that its micro-batches' losses do not have ({error}): "
            "training_step decides by all rows what it adds",
            f"{_WHOLE_AND_FIT}, or add a term by what is the same for any rows",
            0.0,
        )
    return scaled_by(VARYING_FACTOR) if isinstance(error, VaryingFactorError) else None


def skips_parts() -> Verdict:
    """The step returns None for rows that count in the loss of all rows."""
    return _refused(
        "training_step returns None for some micro-batches whose rows count in the whole batch's loss",
        f"{_WHOLE_AND_FIT}, or decide by something that is the same for any rows (a loss of zero instead of None "
        "for rows that count nothing)",
        0.0,
    )


def never_as_foreseen(shown: str) -> Verdict:
    """Micro-batches have other losses every time that they run."""
    return _refused(
        f"a micro-batch's loss has other terms or divisors each time that the batch runs again ({shown})",
        f"{_WHOLE_AND_FIT}, or let the loss have the same terms for any rows",
    )


def constant_beside_a_kept_mean() -> Verdict:
    """A learned factor's gradient would be wrong: the constant that it scales would count more than once."""
    return _refused(
        "a learned factor of the loss scales a constant together with a mean whose divisor is clamped "
        "(`.clamp(min=1)`): its gradient would hold the constant once for every micro-batch",
        f"{_WHOLE_AND_FIT}, or add the constant outside of what the factor scales",
    )


def changes_in_parts(changes: Sequence[StepChange]) -> Verdict:
    """The step changes more than gradients, and micro-batches would not leave what the whole batch leaves."""
    names = ", ".join(str(change) for change in changes[:5]) or "what another rank's message names"
    verb = "reads" if any(change.kind == "gradient" for change in changes) else "changes"
    return _refused(
        f"training_step {verb} {names}: it would do so once in every micro-batch",
        f"{_WHOLE}, or change it once a step, in on_train_batch_end",
        0.0,
    )


def handed_on(names: Iterable[str], error: float, failure: str) -> Verdict:
    """A step depends on state that the previous one has left; `failure` is its error, if it fails."""
    listed = ", ".join(dict.fromkeys(names))
    return _refused(
        f"training_step hands values on to the next one{f', in {listed}' if listed else ''}: a micro-batch "
        f"would start with those of other samples{failure}",
        f"{_WHOLE}, or keep them apart by sample",
        error,
    )


def curved(why: str, error: float) -> Verdict:
    """The loss's graph shows that it is no sum over rows."""
    return _refused(
        f"the loss is no sum over its rows: {why} is applied to what was reduced over them",
        f"{_WHOLE_AND_FIT}, or move it into the mean (a mean of roots for a root of a mean)",
        error,
    )


def joint(term: str) -> Verdict:
    """Rows have a term only together; on the rows that were compared its gradients may be zero."""
    return _refused(
        f"the loss of some rows has a term ({term}) that the loss of neither half of them has: one between rows, or "
        "one that a step adds for a certain number of rows",
        f"{_WHOLE_AND_FIT}, or take such a term within each row",
        float("inf"),
    )


def divided_unlike(what: str, error: float) -> Verdict:
    """A term's divisors follow no law."""
    return _refused(
        f"the loss has {what}: a mean over pairs of rows, or another number than what it counts",
        f"{_WHOLE_AND_FIT}, or divide each term by what it is a mean over",
        error,
    )


def bent(run: Run, error: float) -> Verdict:
    """A hook or a backward changes gradients in a way that is not linear in them."""
    hooks = run.hooks_by_micro_batch()
    named = f" ({', '.join(hooks[:3])})" if hooks else ""
    late = [name for name in hooks if name.endswith(AFTER_GRADIENT)]
    if late:
        return _refused(
            f"{', '.join(late[:3])} would see gradients that are not complete: on several ranks, and beside an "
            "optimizer that steps in the backward, such hooks can't be called later",
            f"change gradients in on_before_optimizer_step, which runs once a step, or {_WHOLE}",
            0.0,
        )
    return _refused(
        f"half of the loss has not half of its gradients: a hook{named} or a backward of the module's own changes "
        "them by more than a factor, and would see those of one micro-batch",
        f"change gradients in on_before_optimizer_step, which runs once a step, or {_WHOLE}",
        error,
    )


def missed(whole: Tensor, gradients: Sequence[Tensor], shares: Sequence[float], miss: Miss) -> Verdict:
    """The micro-batches' gradients don't add up: by how much, in which parameters, and the likely cause.

    Args:
        whole: the gradient of all rows.
        gradients: the gradients of the micro-batches.
        shares: the weights of the micro-batches.
        miss: the result of the comparison.
    """
    if not gradients:
        return _refused("no micro-batch has a loss", "pass split=", miss.relative_error)
    verdict = decomposability.judge(whole, gradients, normalized(shares), 0.0)
    named = ", ".join(f"{name} ({error:.1%})" for name, error in miss.parameters)
    # All gradients together may add up although a term, compared by itself, does not: then there is no cause.
    told = verdict.cause or "one of the loss's terms is no mean and no sum over the rows"
    cause = f"{told}{f'; most in {named}' if named else ''}"
    return _refused(cause, verdict.remedy or _WHOLE_AND_FIT, miss.relative_error)


def _refused(cause: str, remedy: str, error: float = float("inf")) -> Verdict:
    return Verdict(adds_up=False, relative_error=error, cause=cause, remedy=remedy)


class Weighed(Protocol):
    """What is known of how micro-batches are weighed; implemented by `Weighing`."""

    verdict: Verdict | None
    rules: LossRules | None
    unproven: str
    weigh_by: WeighBy | Weigher


def without_remedy(why: str) -> str:
    """The first half of what `why_whole` says, for where it was mended."""
    return why.partition(" To mend it, ")[0]


def why_whole(weighing: Weighed, *, by_itself: bool) -> str:
    """Why a loss can't be split, and what to do; empty if it can, or if nothing is known.

    Args:
        weighing: what is known of the loss.
        by_itself: the user has given neither `weigh_by` nor `split`.
    """
    if weighing.unproven and by_itself:
        return (
            f"Whether a batch may be split can't be found out, since {weighing.unproven}. To mend it, keep the "
            "batch whole (micro_batch_size = the loader's batch size), or write weigh_by= to say what the loss "
            "is a mean over."
        )
    verdict = weighing.verdict
    if verdict is None or verdict.adds_up:
        return ""
    if verdict.relative_error == 0:
        return f"Batches are not split: {verdict.cause}. To mend it, {verdict.remedy}."
    by = f" by {verdict.relative_error:.1%}" if isfinite(verdict.relative_error) else ""
    return (
        f"The weighted gradients of a batch's micro-batches miss the whole batch's{by}: {verdict.cause}. To mend it, "
        f"{verdict.remedy}."
    )


def weighed_by(weighing: Weighed) -> str:
    """What micro-batches are weighed by, in words for the user."""
    if weighing.rules is not None:
        return "what the loss shows that it divides by"
    weigh_by = weighing.weigh_by
    if not isinstance(weigh_by, str):
        return "the given callable"
    return "the batch's own count" if weigh_by == "auto" else weigh_by


def unchecked(reason: str, weigh_by: object) -> str:
    """The warning where nothing can be compared."""
    return (
        f"MemoryBudget can't check that the loss may be split, since {reason}: it is taken to be a mean over "
        f"{weigh_by}. Write weigh_by= to say what it is a mean over."
    )
