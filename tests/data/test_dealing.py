import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_memkit.data.batching.dealing import Deal, DealOptions, deal_rows
from lightning_memkit.data.packing.pack import pack


def work_of(documents: int, context: int = 2048) -> np.ndarray:
    lengths = np.random.default_rng(0).lognormal(5.5, 1, documents).clip(1, context).astype(int)
    return pack(lengths, context).row_work()


def numbers(deal: Deal) -> list[int]:
    return deal.rows[deal.rows >= 0].tolist()


def at_random(rows: int, options: DealOptions) -> np.ndarray:
    steps = rows // options.rows_per_step
    order = np.random.default_rng(1).permutation(rows)[: steps * options.rows_per_step]
    return order.reshape(steps, options.ranks, options.batch_size)


@settings(max_examples=150, deadline=None)
@given(
    work=st.lists(st.integers(1, 1000), min_size=8, max_size=90),
    batch_size=st.integers(1, 5),
    ranks=st.sampled_from([1, 2, 3, 4, 8]),
    drop_last=st.booleans(),
    epoch=st.integers(0, 3),
)
def test_every_row_goes_to_one_rank_and_step(work, batch_size, ranks, drop_last, epoch):
    options = DealOptions(batch_size=batch_size, ranks=ranks, drop_last=drop_last)
    if drop_last and len(work) < options.rows_per_step:
        with pytest.raises(ValueError, match=f"{len(work)} rows are too few"):
            deal_rows(work, options, epoch=epoch)
        return
    deal = deal_rows(work, options, epoch=epoch)
    assert len(set(numbers(deal))) == len(numbers(deal)) == len(work) - deal.dropped_rows
    sizes = np.array([[len(deal.batch(step, rank)) for rank in range(ranks)] for step in range(len(deal))])
    assert sizes.min() >= 1
    assert sizes.max() <= batch_size
    assert (np.ptp(sizes, axis=1) <= 1).all()
    if drop_last:
        assert (sizes == batch_size).all()
        assert deal.dropped_rows == len(work) % options.rows_per_step
    elif batch_size > 1 or len(work) % ranks == 0:
        assert deal.dropped_rows == 0
    if len(work) % ranks == 0:
        assert len(set(sizes.sum(axis=0).tolist())) == 1


def test_ranks_get_the_same_number_of_rows_of_a_divisible_packing():
    lengths = np.random.default_rng(0).integers(1, 100, 2005)
    packing = pack(lengths, 128).divisible(8)
    deal = deal_rows(packing.row_work(), DealOptions(batch_size=3, ranks=8))
    assert packing.rows % (3 * 8)
    assert deal.dropped_rows == 0
    assert (deal.rows >= 0).sum(axis=(0, 2)).tolist() == [packing.rows // 8] * 8


@pytest.mark.parametrize("batch_size", [1, 4, 16])
@pytest.mark.parametrize(("documents", "context"), [(20_000, 2048), (100_000, 8192)])
def test_eight_ranks_get_equal_work_over_the_epoch_and_in_every_step(documents, context, batch_size):
    work = work_of(documents, context)
    options = DealOptions(batch_size=batch_size, ranks=8)
    dealt = deal_rows(work, options).balance(work)
    random = Deal(rows=at_random(len(work), options), dropped_rows=0).balance(work)
    assert dealt.ranks <= 1.0002
    assert dealt.waiting < 1.02
    assert random.waiting - 1 > 10 * (dealt.waiting - 1)
    assert random.ranks > dealt.ranks


@pytest.mark.parametrize("epoch", range(5))
def test_a_small_corpus_with_rows_left_over_is_dealt_evenly(epoch):
    work = np.sort(work_of(20_000, 8192))[::-1]
    assert len(work) % 32 not in (0, 8, 16, 24)
    balance = deal_rows(work, DealOptions(batch_size=4, ranks=8), epoch=epoch).balance(work)
    assert balance.ranks <= 1.006
    assert balance.waiting < 1.03


def test_balance_is_that_of_sums_by_hand():
    deal = Deal(rows=np.array([[[0, 1], [2, 3]], [[4, -1], [5, -1]]]), dropped_rows=0)
    balance = deal.balance([1, 2, 3, 4, 10, 20])
    assert balance.ranks == pytest.approx(27 / 20)
    assert balance.waiting == pytest.approx((7 + 20) / (5 + 15))
    assert balance.steps == 1


def test_steps_of_many_rows_hold_equal_work():
    work = work_of(40_000)
    options = DealOptions(batch_size=32, ranks=2)
    random = Deal(rows=at_random(len(work), options), dropped_rows=0).balance(work)
    assert deal_rows(work, options).balance(work).steps < 1.03 < random.steps


def test_what_one_group_leaves_uneven_the_next_evens_out():
    work = work_of(100_000, 8192)
    one, many = (deal_rows(work, DealOptions(batch_size=size, ranks=8)).balance(work) for size in (1, 16))
    assert many.waiting - 1 < 0.4 * (one.waiting - 1)


def test_parts_of_a_batch_are_of_equal_work_on_all_ranks():
    work = work_of(40_000)
    rows = deal_rows(work, DealOptions(batch_size=8, ranks=4)).rows[:-2]
    by_part = work[rows].astype(float)
    assert by_part.max(axis=1).sum() / by_part.mean(axis=1).sum() < 1.01
    # The longest rows don't all stand in the same part.
    assert np.ptp(by_part.mean(axis=(0, 1))) < 0.2 * by_part.mean()


def test_an_epochs_order_follows_from_seed_and_epoch():
    work = work_of(5000)

    def order(seed: int, epoch: int) -> list[int]:
        return numbers(deal_rows(work, DealOptions(batch_size=4, ranks=2, seed=seed), epoch=epoch))

    assert order(0, 0) == order(0, 0)
    assert order(0, 0) != order(0, 1) != order(1, 0) != order(0, 0)


def test_rows_meet_other_rows_in_every_epoch():
    work = np.arange(1, 1601)

    def pairs(epoch: int) -> set[frozenset[int]]:
        rows = deal_rows(work, DealOptions(batch_size=1, ranks=2), epoch=epoch).rows
        return {frozenset(step) for step in rows.reshape(-1, 2).tolist()}

    assert len(pairs(0) & pairs(1)) < 0.4 * 800


def test_dropped_and_last_rows_are_others_in_every_epoch():
    work = np.arange(1, 104)
    dropped = [
        set(range(103))
        - set(numbers(deal_rows(work, DealOptions(batch_size=10, drop_last=True), epoch=epoch)))
        for epoch in range(20)
    ]
    assert all(len(rows) == 3 for rows in dropped)
    assert len(set.union(*dropped)) > 30


def test_a_run_goes_on_at_any_step_from_three_numbers():
    work = work_of(3000)
    options = DealOptions(batch_size=3, ranks=4)
    whole = [deal_rows(work, options, epoch=epoch) for epoch in range(2)]
    for done in np.random.default_rng(0).integers(0, 2 * len(whole[0]), 20).tolist():
        state = {"seed": 0, "epoch": done // len(whole[0]), "batches_done": done % len(whole[0])}
        again = deal_rows(work, DealOptions(batch_size=3, ranks=4, seed=state["seed"]), epoch=state["epoch"])
        for rank in range(4):
            rest = [again.batch(step, rank).tolist() for step in range(state["batches_done"], len(again))]
            epoch = whole[state["epoch"]]
            assert rest == [epoch.batch(step, rank).tolist() for step in range(len(epoch))][-len(rest) :]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 12])
def test_steps_hold_the_same_rows_on_another_number_of_ranks(ranks):
    work = work_of(3000)
    before = deal_rows(work, DealOptions(batch_size=6, ranks=4))
    after = deal_rows(work, DealOptions(batch_size=24 // ranks, ranks=ranks, group=4))

    def steps(deal: Deal) -> list[list[int]]:
        return [sorted(step[step >= 0].tolist()) for step in deal.rows.reshape(len(deal), -1)]

    assert steps(before) == steps(after)
    options = DealOptions(batch_size=24 // ranks, ranks=ranks)
    random = Deal(rows=at_random(len(work), options), dropped_rows=0).balance(work)
    assert after.balance(work).waiting - 1 <= 0.5 * (random.waiting - 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(batch_size=0), "batch_size=0 is below 1"),
        (dict(batch_size=1, ranks=0), "ranks=0 is below 1"),
        (dict(batch_size=1, seed=-1), "seed=-1 is below 0"),
        (dict(batch_size=2, ranks=4, group=3), "group=3 does not divide the 8 rows"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        DealOptions(**options)


def test_too_few_rows_are_refused():
    with pytest.raises(ValueError, match="3 rows are too few .* on 4 rank"):
        deal_rows([1, 1, 1], DealOptions(batch_size=2, ranks=4))
    with pytest.raises(ValueError, match="0 rows are too few"):
        deal_rows([], DealOptions(batch_size=2))
    with pytest.raises(ValueError, match="last step has 2 rows .*too few for 4 ranks"):
        deal_rows([1] * 10, DealOptions(batch_size=2, ranks=4, group=2))
