"""How batches are split has one owner: `Partition` changes by its methods, and nobody assigns to it."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import lightning_memkit
from lightning_memkit.micro_batching.history import WHOLE
from lightning_memkit.micro_batching.parts.partition import Partition

PACKAGE = Path(lightning_memkit.__file__).parent
OWNER = PACKAGE / "micro_batching" / "parts" / "partition.py"


def assigned(source: str) -> Iterator[str]:
    """The attributes of anything called a partition that a source assigns to."""
    for node in ast.walk(ast.parse(source)):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in targets:
            for one in ast.walk(target) if target is not None else ():
                if isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Store):
                    if ast.unparse(one.value).rpartition(".")[2].strip("_") == "partition":
                        yield ast.unparse(one)


@pytest.mark.parametrize(
    "planted",
    [
        "self._runner.partition.micro_batch_size = 4",
        "partition.unlike, other = True, 1",
        "partition.fewest += 1",
        "for partition.fewest in range(3): ...",
    ],
)
def test_an_assignment_from_outside_is_seen(planted: str) -> None:
    assert len(list(assigned(planted))) == 1


def test_nobody_but_its_methods_changes_a_partition() -> None:
    found = {
        str(path.relative_to(PACKAGE)): names
        for path in PACKAGE.rglob("*.py")
        if path != OWNER and (names := list(assigned(path.read_text(encoding="utf-8"))))
    }
    assert found == {}


def test_a_form_that_is_taken_for_a_retry_ends_with_it() -> None:
    partition = Partition(micro_batch_size=WHOLE)
    partition.resize(6)
    partition.form_by_tokens(128, frozenset({"labels"}))
    first = partition.form
    partition.resize(3)
    partition.form_by_rows()

    def fail() -> None:
        with partition.formed(first):
            assert (partition.micro_batch_size, partition.row_tokens) == (6, 128)
            raise torch.OutOfMemoryError

    with pytest.raises(torch.OutOfMemoryError):
        fail()
    assert partition.form == (3, None, None, None)


def test_terms_that_once_weighed_unlike_stay_noted() -> None:
    partition = Partition(micro_batch_size=2)
    partition.note_values()
    partition.combine_by(partition.combination, held=False, unlike=False)
    assert partition.unlike


def test_a_survey_is_of_the_batches_that_asked_for_it() -> None:
    partition = Partition(micro_batch_size=2)
    partition.survey_batch(3)
    assert [index for index in range(6) if partition.surveys(index, is_told=True)] == [3]
    partition.look_up_in(range(4, 6))
    assert [index for index in range(6) if partition.looks_up(index)] == [4, 5]
    partition.survey_each_batch()
    assert [index for index in range(6) if partition.surveys(index, is_told=index < 5)] == [3, 5]
    assert partition.unlike
