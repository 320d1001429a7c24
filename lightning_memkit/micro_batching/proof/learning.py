"""Learn from a comparison of rows for later batches: numbers that predict divisors, and rules of the rests.

A rest is the part of a loss that has no gradient (see `graph/rests.py`).
"""

from lightning_memkit.micro_batching.graph.loss_rules import LossRules
from lightning_memkit.micro_batching.graph.rests import Rest, RestRules
from lightning_memkit.micro_batching.graph.term_values import rounding_of_terms, weighed_value
from lightning_memkit.micro_batching.parts.facets import facets_of
from lightning_memkit.micro_batching.parts.joining_rules import ROUNDED
from lightning_memkit.micro_batching.parts.logged_values import LoggedValues
from lightning_memkit.micro_batching.parts.returned_values import ReturnedValues
from lightning_memkit.micro_batching.proof import decomposability
from lightning_memkit.micro_batching.proof.by_terms import counts_of
from lightning_memkit.micro_batching.proof.judged import counts_by_way
from lightning_memkit.micro_batching.proof.row_runs import (
    ComparisonOutcome,
    Rows,
    TrialStep,
)
from lightning_memkit.micro_batching.run import Step
from lightning_memkit.micro_batching.shares.batch_counts import Foretelling


def learn_counts(rows: Rows, foretold: Foretelling, outcome: ComparisonOutcome, rules: LossRules) -> None:
    """Compare numbers of the batch with each term's counts in the rows and their micro-batches."""
    present = outcome.present
    counts = [
        counts_of(rules, outcome.whole),
        *(counts_of(rules, outcome.parts[index]) for index in present),
    ]
    batches = [rows.whole, *(rows.parts[index] for index in present)]
    foretold.learn(
        batches,
        [
            [count[index] for count in counts] if index in {*rules.means} - outcome.kept else None
            for index in range(len(rules.rules))
        ],
        [(rule.name, rule.index, rule.branch) for rule in rules.rules],
    )


def learn_values(
    step: Step,
    probed: Rows,
    outcome: ComparisonOutcome,
    *,
    logs: LoggedValues,
    returned: ReturnedValues,
    rests: RestRules | None,
) -> RestRules | None:
    """Learn how logged and returned values of a batch come from those of its micro-batches.

    Args:
        step: the step whose rows were compared.
        probed: the rows.
        outcome: the result of the comparison.
        logs: learns how logged values combine.
        returned: learns how returned values combine.
        rests: what is known of the parts of the loss without a gradient, None before the first comparison.

    Returns:
        `rests`, or new ones where the loss has other terms than before.
    """
    parts = [part for part in outcome.parts if part is not None]
    exact = step.run.precision in ("32-true", "64-true")
    allowed = decomposability.tolerance(step.run.module.parameters(), reduced=not exact)
    allowed = min(allowed, ROUNDED) if exact else allowed
    shares, sizes = outcome.present_shares, [probed.sizes[index] for index in outcome.present]
    if outcome.rules is not None:
        if rests is None or rests.pieces != len(outcome.rules.rules) + 1:
            rests = RestRules(len(outcome.rules.rules))
        learn_rests(probed, rests, outcome, allowed)
    losses = [part.loss for part in parts]
    logs.note_loss(outcome.whole.loss, losses, outcome.whole.logged)
    returned.loss_names.note(outcome.whole.loss, losses, outcome.whole.returned.items())
    logs.seen.update(*(facets_of(probed.parts[index]) for index in outcome.present))
    logs.compare(outcome.whole.logged, [part.logged for part in parts], shares, sizes, allowed)
    ways = counts_by_way(probed, outcome)
    returned.compare(outcome.whole.returned, [part.returned for part in parts], ways, allowed)
    return rests


def learn_rests(compared: Rows, rests: RestRules, outcome: ComparisonOutcome, noise: float) -> None:
    """Let the rules of the rests learn from a comparison by the loss's terms.

    Args:
        compared: the rows.
        rests: the rules.
        outcome: the result of the comparison.
        noise: the relative noise of a number that is computed from rows.
    """
    rules = outcome.rules
    assert rules is not None
    sizes = [compared.sizes[index] for index in outcome.present]
    parts = [outcome.parts[index] for index in outcome.present]
    runs = [run for run in (outcome.whole, *parts) if run is not None]
    found = [_rest_of(rules, run, rows) for run, rows in zip(runs, [sum(sizes), *sizes], strict=True)]
    told = [rest for rest in found if rest is not None]
    if len(told) < len(runs):
        return
    readings = [rules.read(run.terms) for run in runs]
    rounding = max(
        rounding_of_terms(reading, run.values, run.loss) for reading, run in zip(readings, runs, strict=True)
    )
    rests.learn(rules, told[0], told[1:], rounding, max(noise, 1e-6))


def _rest_of(rules: LossRules, run: TrialStep, rows: int) -> Rest | None:
    reading = rules.read(run.terms)
    counts = counts_of(rules, run)
    found = weighed_value(run.loss, reading, [1.0] * len(counts), run.values)
    return None if found is None or found[1] is None else Rest(pieces=found[1], counts=counts, rows=rows)
