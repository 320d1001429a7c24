import pytest

from lightning_memkit.data.packing.pack import WorkLimit, pack
from lightning_memkit.data.packing.streaming import StreamPacker


@pytest.mark.parametrize("linear", [0, 1, 7, 10_000])
def test_the_longest_document_is_the_longest_whose_work_fits(linear):
    limit = WorkLimit(most=10**9, linear=linear)
    for work in (0, linear, linear + 1, 2 * linear + 4, 10**6 - 1, 10**6, 10**6 + 1, 10**18):
        longest = limit.longest(work)
        assert longest * (longest + linear) <= work < (longest + 1) * (longest + 1 + linear)


def test_a_document_beyond_the_work_limit_counts_as_long():
    limit = WorkLimit(most=100)
    with pytest.raises(ValueError, match="1 of 2 documents are longer than the 10 tokens .*most=100"):
        pack([11, 2], 64, work_limit=limit)
    split = pack([11, 2], 64, long_documents="split", work_limit=limit)
    assert sorted(split.lengths.tolist()) == [1, 2, 10]
    truncated = pack([11, 2], 64, long_documents="truncate", work_limit=limit)
    assert (truncated.truncated_documents, truncated.truncated_tokens) == (1, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(most=0), "most=0 is below 1"),
        (dict(most=9, linear=9), "most=9 is below 10, the work of one token"),
        (dict(most=9, linear=-1), "linear=-1 is below 0"),
    ],
)
def test_a_limit_that_admits_nothing_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        WorkLimit(**options)


def test_the_longest_document_is_named_by_its_number() -> None:
    with pytest.raises(ValueError, match=r"2 of 5 .* longer than context=8 .number 2, from 0, has 90 tokens"):
        pack([3, 4, 90, 12, 2], 8)
    packer = StreamPacker(8, first_document=100)
    packer.extend([3, 4])
    with pytest.raises(ValueError, match="number 102, from 0, has 90 tokens"):
        packer.extend([90, 12])
