"""Options of PackedDataModule in another form than its own: taken where they can only mean one thing, else refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_memkit.data.loading.batch_options import BatchOptions
from lightning_memkit.data.packing.pack import WorkLimit
from lightning_memkit.data.sources.shares import DocumentOptions
from lightning_memkit.plugins.data.packed_data import PackedDataModule

IDS = [[1, 2, 3], [4, 5]]


def test_a_mapping_of_options_is_the_options():
    given: Any = {"documents": {"validation": 0}, "batches": {"prefetch": 3}, "work_limit": {"most": 64}}
    data = PackedDataModule(IDS, context=8, **given)
    assert data.documents == DocumentOptions(validation=0)
    assert data.batches == BatchOptions(prefetch=3)
    assert data.work_limit == WorkLimit(most=64)
    data.setup()
    (batch,) = data.train_dataloader()
    assert batch.real_tokens == 5
    empty: Any = {}
    assert PackedDataModule(IDS, documents=empty, batches=empty).documents == DocumentOptions()


def test_numbers_of_numpy_are_numbers():
    sizes: Any = {
        "context": np.int64(8),
        "batch_size": np.int32(4),
        "documents": {"validation": np.float32(0)},
    }
    data = PackedDataModule(IDS, **sizes)
    data.setup()
    assert sum(batch.real_tokens for batch in data.train_dataloader()) == 5


def test_a_path_of_a_tokenizer_is_its_name(tmp_path):
    folder: Any = Path("some", "folder")
    assert PackedDataModule(IDS, tokenizer=folder).tokenizer == "some/folder"


class Loaded:
    """A tokenizer that was loaded already, as those of transformers: its repr is long."""

    name_or_path = "some/model"

    def __call__(self, text: str) -> list[int]:
        return [*text.encode()]

    def __repr__(self) -> str:
        return "Loaded(\n" + "added_tokens, " * 200


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"documents": "my.jsonl"},
            r"documents='my.jsonl' is no mapping of options \(text_field, kind, .*write .*by name",
        ),
        (
            {"documents": ["my.jsonl"]},
            r"documents=\['my.jsonl'\] is no .*documents=\{'text_field': \.\.\.\}, in YAML",
        ),
        ({"documents": None}, r"documents=None is no mapping of options .*, or leave it out"),
        ({"documents": BatchOptions()}, r"documents=BatchOptions\("),
        (
            {"documents": {"valid": 0}},
            r"documents has no option 'valid' \(did you mean 'validation'\?\); it has text_",
        ),
        ({"documents": {"validation": 2}}, r"validation=2 is outside \[0, 1\)"),
        ({"documents": {"validation": "0.1"}}, r"validation='0.1' is no number; write validation=0.1\."),
        ({"documents": {"seed": "1"}}, r"seed='1' is no whole number; write seed=1\."),
        ({"documents": {"limit": 1.5}}, r"limit=1.5 is neither a whole number nor None; give one\."),
        (
            {"documents": {"mask_prompt": "no"}},
            r"mask_prompt='no' is neither True nor False; write mask_prompt=False",
        ),
        ({"documents": {"text_field": None}}, r"text_field=None is no name; give that of the field"),
        ({"batches": 4}, r"batches=4 is no mapping of options \(num_workers, prefetch, "),
        ({"batches": {"num_workers": "2"}}, r"num_workers='2' is no whole number; write num_workers=2\."),
        ({"batches": {"multiple_of": None}}, r"multiple_of=None is no whole number; give one\."),
        ({"batches": {"drop_last": "true"}}, r"drop_last='true' is neither .* write drop_last=True\."),
        ({"work_limit": 4096}, r"work_limit=4096 is no mapping of options \(most, linear\)"),
        ({"work_limit": {"most": "64"}}, r"most='64' is no whole number; write most=64\."),
        ({"context": "64"}, r"context='64' is no whole number; write context=64\."),
        ({"context": 64.5}, r"context=64.5 is no whole number; give one\."),
        ({"context": None}, r"context=None is no whole number; give one\."),
        ({"context": True}, r"context=True is no whole number; give one\."),
        ({"batch_size": "4"}, r"batch_size='4' is neither a whole number nor None; write batch_size=4\."),
        ({"batch_size": 4.0}, r"batch_size=4.0 is neither a whole number nor None; write batch_size=4\."),
        ({"batch_tokens": "1k"}, r"batch_tokens='1k' is neither a whole number nor None; give one\."),
        (
            {"tokenizer": None},
            r'tokenizer=None is no name of a tokenizer; write "bytes", or the name or folder',
        ),
        ({"tokenizer": ""}, r"tokenizer='' is no name of a tokenizer"),
        (
            {"tokenizer": lambda text: [1]},
            r"tokenizer=<function .* is no name .* give the token ids that it makes as the",
        ),
        (
            {"tokenizer": Loaded()},
            r"tokenizer=Loaded\( added.*\.\.\. is no .*; write tokenizer='some/model', or the",
        ),
        ({"tokenizer": 64}, r"tokenizer=64 is no name .* name the others, as in context=64\."),
    ],
)
def test_another_form_is_refused_at_construction_with_what_to_write(options, message):
    with pytest.raises(ValueError, match=f"^{message}") as refused:
        PackedDataModule(IDS, **options)
    assert len(str(refused.value)) < 360
    assert "\n" not in str(refused.value)


def test_sizes_without_their_names_are_refused():
    sizes: Any = (64, 4)
    with pytest.raises(
        ValueError, match="tokenizer=64 is no name of a tokenizer; the argument after the source is"
    ):
        PackedDataModule("my.jsonl", *sizes)


@pytest.mark.parametrize("given", [None, 5, 0.5, b"text", "", True])
def test_no_source_is_refused_at_construction(given):
    with pytest.raises(
        ValueError, match=r"^source=.* is no source; give 'python-stdlib', the path of a file"
    ):
        PackedDataModule(given)
    with pytest.raises(ValueError, match=r"^source\['train'\]=.* is no source"):
        PackedDataModule({"train": given})
    with pytest.raises(ValueError, match=r"^source has the keys \['training'\]"):
        PackedDataModule({"training": IDS})


def test_a_batch_of_rows_and_tokens_has_both_limits():
    rows: Any = {"packing": "none", "padding": "bucket", "documents": {"validation": 0}}
    data = PackedDataModule(
        [[1] * 4] * 64 + [[2] * 64] * 8, context=64, batch_size=8, batch_tokens=128, **rows
    )
    data.setup()
    shapes = {tuple(batch["input_ids"].shape) for batch in data.train_dataloader()}
    assert shapes == {(8, 4), (2, 64)}
