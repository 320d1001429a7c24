import numpy as np
import pytest

from lightning_memkit.data.sources.token_records import token_store


def test_documents_come_back_and_take_the_narrowest_type():
    store = token_store([[1, 2], [], np.array([65535])])
    assert [store[n].tolist() for n in range(3)] == [[1, 2], [], [65535]]
    assert store.tokens.dtype == np.uint16
    assert token_store([[65536]]).tokens.dtype == np.int32
    assert store.lengths.tolist() == [2, 0, 1]


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        ([[1], [-1]], "A token id is -1"),
        ([[0.5]], "Document 0 is float64"),
        ([[1], [[1]]], r"Document 1 .* shape \(1, 1\)"),
        (["text"], "Document 0 is <U4"),
        ([{"text": "x"}], r"Record 0 has the fields \['text'\] and no 'input_ids'"),
    ],
)
def test_what_is_no_document_is_named(documents, message):
    with pytest.raises(ValueError, match=message):
        token_store(documents)


@pytest.mark.parametrize("number", [-1, 1])
def test_there_is_no_document_outside(number):
    with pytest.raises(IndexError, match="outside 0 to 0"):
        token_store([[1]])[number]
