import numpy as np
import pytest

from lightning_memkit.data.sources.shares import DocumentOptions, deal_documents
from lightning_memkit.utilities.errors import NoEffectWarning


def test_every_document_falls_to_one_share_of_about_the_size_asked_for():
    shares = deal_documents(20_000, DocumentOptions(validation=0.1, test=0.2))
    assert sorted(np.concatenate(list(shares.values()))) == list(range(20_000))
    assert len(shares["validation"]) == pytest.approx(2000, rel=0.1)
    assert len(shares["test"]) == pytest.approx(4000, rel=0.1)


def test_shares_stay_as_documents_are_added_and_differ_by_seed():
    before, after = (deal_documents(n, DocumentOptions(validation=0.3)) for n in (500, 900))
    assert before["validation"].tolist() == [n for n in after["validation"].tolist() if n < 500]
    other = deal_documents(500, DocumentOptions(validation=0.3, seed=1))
    assert before["validation"].tolist() != other["validation"].tolist()


def test_a_limit_draws_among_all_documents():
    shares = deal_documents(10_000, DocumentOptions(limit=100, validation=0.2))
    drawn = np.concatenate(list(shares.values()))
    assert len(set(drawn.tolist())) == 100
    assert drawn.max() > 5000


def test_a_share_that_gets_no_document_is_reported():
    with pytest.warns(NoEffectWarning, match="Of 2 documents none falls to validation"):
        deal_documents(2, DocumentOptions(validation=0.01))
    with pytest.warns(NoEffectWarning, match="none falls to test"):
        deal_documents(2, DocumentOptions(validation=0.0, test=0.01))


def test_nothing_to_train_on_is_refused():
    with pytest.raises(ValueError, match="Of 1 documents none falls to train"):
        deal_documents(1, DocumentOptions(validation=0.99))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"validation": 5}, r"validation=5 is outside \[0, 1\); for 5 % write 0.05"),
        ({"test": -0.1}, "test=-0.1 is outside"),
        ({"validation": 0.5, "test": 0.5}, "leave nothing to train on"),
        ({"limit": 0}, "limit=0 is below 1"),
        ({"seed": -1}, "seed=-1 is below 0"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        DocumentOptions(**options)
