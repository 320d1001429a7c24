"""What is said of a batch that may not be split: the cause, and the remedy."""

from collections.abc import Iterable, Sequence
from math import isfinite
from typing import Protocol

from torch import Tensor

from lightning_memkit.micro_batching import WeighBy, Weigher, normalized
from lightning_memkit.micro_batching.changes.step_changes import StepChange
from lightning_memkit.micro_batching.graph.loss_rules import LossRules
from lightning_memkit.micro_batching.proof import decomposability
from lightning_memkit.micro_batching.proof.comparison import Miss
from lightning_memkit.micro_batching.proof.decomposability import Verdict
from lightning_memkit.micro_batching.run import Run

_SIZE = "micro_batch_size = the loader's batch size"
_WHOLE = f"keep the batch whole ({_SIZE})"
_WHOLE_AND_FIT = f"keep the batch whole ({_SIZE}; ActivationCheckpointing helps it to fit)"


def scaled_by(shown: str) -> Verdict:
    """A micro-batch's loss has shown that rows act on each other."""
    return _refused(
        f"the samples of a batch act on each other in the loss, which is scaled by {shown}",
        f"{_WHOLE_AND_FIT}, or pass split= so that each part holds a complete group",
    )


def fails_on_parts(cause: Exception) -> Verdict:
    """The whole batch may well run: a module may ask for a certain number of samples."""
    return _refused(
        f"training_step fails on a part of the batch ({type(cause).__name__}: {cause})",
        f"{_WHOLE}, or pass split=",
    )


def never_as_foreseen(shown: str) -> Verdict:
    """Micro-batches have other losses each time that they run."""
    return _refused(
        f"a micro-batch's loss is another one than foreseen, however often the batch begins again ({shown})",
        f"{_WHOLE_AND_FIT}, or let the loss have the same terms for any rows",
    )


def constant_beside_a_kept_mean() -> Verdict:
    """A learned factor's gradient would be another one: what it scales adds up to more than once in micro-batches."""
    return _refused(
        "a learned factor of the loss scales a constant together with a mean whose divisor is kept from less "
        "(`.clamp(min=1)`): its gradient would see the constant once in every micro-batch",
        f"{_WHOLE_AND_FIT}, or add the constant outside of what the factor scales",
    )


def changes_in_parts(changes: Sequence[StepChange]) -> Verdict:
    """The step changes more than gradients, and parts would not change it as the whole does."""
    names = ", ".join(str(change) for change in changes[:5]) or "what another rank's message names"
    return _refused(
        f"training_step changes {names}: in parts it would do so once for each of them",
        f"{_WHOLE}, or change it once a step: in on_train_batch_end, or on_before_zero_grad",
        0.0,
    )


def handed_on(names: Iterable[str], error: float, failure: str) -> Verdict:
    """A step depends on what the one before has left; `failure` is its error, if it fails."""
    listed = ", ".join(dict.fromkeys(names))
    return _refused(
        f"training_step hands values on to the next one{f', in {listed}' if listed else ''}: a part would take over "
        f"those of other samples{failure}",
        f"{_WHOLE}, or keep them apart by sample",
        error,
    )


def curved(why: str, error: float) -> Verdict:
    """The loss's graph shows what is no sum over rows."""
    return _refused(
        f"the loss is no sum over its rows: {why} is applied to what was reduced over them",
        f"{_WHOLE_AND_FIT}, or move it into the mean (a mean of roots for a root of a mean)",
        error,
    )


def divided_unlike(what: str, error: float) -> Verdict:
    """What the graph shows that a term is divided by adds up to nothing."""
    return _refused(
        f"the loss has {what}: a mean over pairs of rows, or another number than what it counts",
        f"{_WHOLE_AND_FIT}, or divide each term by what it is a mean over",
        error,
    )


def bent(run: Run, error: float) -> Verdict:
    """Gradients are changed by what is not linear in them."""
    hooks = run.hooks_by_micro_batch()
    named = f" ({', '.join(hooks[:3])})" if hooks else ""
    return _refused(
        f"half of the loss has not half of its gradients: a hook{named} or a backward of the module's own changes "
        "them by more than a factor, and would see those of a part",
        f"change gradients in on_before_optimizer_step, which runs once a step, or {_WHOLE}",
        error,
    )


def missed(whole: Tensor, gradients: Sequence[Tensor], shares: Sequence[float], miss: Miss) -> Verdict:
    """The parts' gradients don't add up: by how much, in which parameters, and what it looks like.

    Args:
        whole: the gradient of all rows.
        gradients: of the parts.
        shares: what each part weighs.
        miss: what the comparison found.
    """
    if not gradients:
        return _refused("no part has a loss", "pass split=", miss.relative_error)
    verdict = decomposability.judge(whole, gradients, normalized(shares), 0.0)
    named = ", ".join(f"{name} ({error:.1%})" for name, error in miss.parameters)
    # Gradients may add up where the loss's terms, each compared by itself, do not.
    told = verdict.cause or "one of the loss's terms is no mean and no sum over the rows"
    cause = f"{told}{f'; most in {named}' if named else ''}"
    return _refused(cause, verdict.remedy or _WHOLE_AND_FIT, miss.relative_error)


def _refused(cause: str, remedy: str, error: float = float("inf")) -> Verdict:
    return Verdict(adds_up=False, relative_error=error, cause=cause, remedy=remedy)


class Weighed(Protocol):
    """How micro-batches are weighed, as far as it is known: `Weighing`."""

    verdict: Verdict | None
    rules: LossRules | None
    unproven: str
    weigh_by: WeighBy | Weigher


def why_whole(weighing: Weighed, *, by_itself: bool) -> str:
    """Why a loss can't be split, and what to do; empty where it can, or nothing is known.

    Args:
        weighing: what is known of the loss.
        by_itself: the user has left it to the proof how micro-batches are made and weighed.
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
        f"The weighted gradients of a batch's parts miss the whole batch's{by}: {verdict.cause}. To mend it, "
        f"{verdict.remedy}."
    )


def weighed_by(weighing: Weighed) -> str:
    """What micro-batches are weighed by, in words."""
    if weighing.rules is not None:
        return "what the loss shows that it divides by"
    weigh_by = weighing.weigh_by
    if not isinstance(weigh_by, str):
        return "the given callable"
    return "the batch's own count" if weigh_by == "auto" else weigh_by
