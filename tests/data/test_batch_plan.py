import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_memkit.data.batching.batch_plan import BatchPlan, PlanOptions
from lightning_memkit.data.packing.pack import PackingMode, pack

CONTEXT = 64


def packing_of(count: int, seed: int = 0, packing: PackingMode = "none"):
    lengths = np.random.default_rng(seed).geometric(0.08, count).clip(1, CONTEXT)
    return pack(lengths, CONTEXT, packing=packing)


@settings(max_examples=120, deadline=None)
@given(
    count=st.integers(30, 300),
    ranks=st.sampled_from([1, 2, 4]),
    batch_size=st.sampled_from([None, 2, 7]),
    batch_tokens=st.sampled_from([None, 64, 200, 1000]),
    padding=st.sampled_from(["longest", "bucket"]),
    packing=st.sampled_from(["none", "bfd"]),
    multiple_of=st.sampled_from([1, 16]),
    shuffle=st.booleans(),
    seed=st.integers(0, 3),
)
def test_every_row_once_within_the_limits_and_equally_many_batches(
    count, ranks, batch_size, batch_tokens, padding, packing, multiple_of, shuffle, seed
):
    if batch_size is None and batch_tokens is None:
        batch_size = 3
    rows = packing_of(count, seed, packing)
    options = PlanOptions(
        batch_size=batch_size, batch_tokens=batch_tokens, padding=padding, shuffle=shuffle, seed=seed
    )
    plan = BatchPlan(rows, options, ranks=ranks, multiple_of=multiple_of)
    for number in (0, 1):
        epoch = plan.epoch(number)
        batches = [epoch.batch(step, rank) for step in range(plan.steps) for rank in range(ranks)]
        dealt = np.concatenate(batches) if batches else np.zeros(0, int)
        assert len(dealt) == len(set(dealt.tolist())) == rows.rows - plan.dropped_rows
        assert plan.dropped_rows < ranks
        for batch in batches:
            longest = int(rows.row_tokens[batch].max())
            padded = min(CONTEXT, -(-longest // multiple_of) * multiple_of)
            assert 1 <= len(batch) <= (batch_size or count)
            assert len(batch) * padded <= (batch_tokens or np.inf)
            assert len(batch) * padded <= plan.most_tokens


def fullness(padding: str, batch_tokens: int = 2048) -> tuple[float, int]:
    rows = packing_of(4000)
    plan = BatchPlan(rows, PlanOptions(batch_tokens=batch_tokens, padding=padding))  # pyright: ignore[reportArgumentType]
    epoch = plan.epoch(0)
    lengths = [rows.row_tokens[epoch.batch(step, 0)] for step in range(plan.steps)]
    return rows.tokens / sum(len(each) * int(each.max()) for each in lengths), plan.steps


def test_buckets_leave_less_padding_and_need_fewer_steps():
    (alike, few), (mixed, many) = fullness("bucket"), fullness("longest")
    assert alike > 0.9
    assert mixed < 0.5
    assert few < 0.6 * many


@pytest.mark.parametrize("options", [{"batch_size": 8}, {"batch_tokens": 300}])
def test_epochs_differ_and_repeat(options):
    for padding in ("longest", "bucket"):
        plan = BatchPlan(packing_of(200), PlanOptions(padding=padding, **options), ranks=2)
        epochs = [[plan.epoch(n).batch(s, 1).tolist() for s in range(plan.steps)] for n in (0, 0, 1)]
        assert epochs[0] == epochs[1]
        assert epochs[0] != epochs[2]


def test_buckets_mix_their_rows_anew_every_epoch():
    plan = BatchPlan(packing_of(500), PlanOptions(padding="bucket", batch_size=4))
    batches = [
        {frozenset(plan.epoch(number).batch(step, 0).tolist()) for step in range(plan.steps)}
        for number in (0, 1)
    ]
    assert len(batches[0] & batches[1]) < 0.2 * plan.steps


def test_a_row_beyond_the_budget_is_refused():
    with pytest.raises(ValueError, match="batch_tokens=20 is less than the longest row's"):
        BatchPlan(packing_of(100), PlanOptions(batch_tokens=20))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "batch_size and batch_tokens are both None"),
        ({"batch_tokens": 0}, "batch_tokens=0 is below 1"),
        ({"batch_size": 2, "padding": "most"}, "padding='most' is unknown"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        PlanOptions(**options)
