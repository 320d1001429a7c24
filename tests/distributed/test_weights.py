"""Two ranks load and initialise sharded modules: each holds its slice of what one process would hold."""

import warnings
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from lightning_memkit.initialization.building import build_empty
from lightning_memkit.initialization.materialization import materialize
from tests.activations.models import transformers_model
from tests.distributed.launch import two_ranks
from tests.distributed.two_ranks_weights import Tied

SOURCES = ["a.safetensors", "b.pt", "c"]


def values() -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in Tied().state_dict().items() if name != "out.weight"}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("weights")
    (folder / "sources").mkdir()
    save_file(values(), folder / "sources" / SOURCES[0])
    torch.save(values(), folder / "sources" / SOURCES[1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(values(), checkpoint_id=folder / "sources" / SOURCES[2], no_dist=True)
    return two_ranks("two_ranks_weights", folder, str(folder / "sources"))["ranks"]


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.long
def test_each_rank_holds_exactly_its_slice(source: str, ranks: list[dict[str, Any]]) -> None:
    for name, value in values().items():
        rows = torch.chunk(value.bfloat16(), 2)
        for rank, found in enumerate(ranks):
            mine = rows[rank] if rank < len(rows) else value.bfloat16()[:0]
            assert torch.equal(found[source][name], mine), (name, rank)


def test_initialisers_give_ranks_the_parts_of_one_process(ranks: list[dict[str, Any]]) -> None:
    with build_empty("cpu", torch.bfloat16):
        alone = Tied()
    torch.manual_seed(7)
    materialize(alone, "cpu")
    for name, parameter in alone.named_parameters():
        for found in ranks:
            assert torch.equal(found["materialized"][name], parameter), name
    assert not ranks[0]["random state kept"]
    assert ranks[1]["random state kept"]


def test_transformers_models_too(ranks: list[dict[str, Any]]) -> None:
    with build_empty("cpu", torch.bfloat16):
        alone = transformers_model("LlamaForCausalLM")
    torch.manual_seed(7)
    materialize(alone, "cpu")
    for found in ranks:
        for name, parameter in alone.named_parameters():
            assert torch.equal(found["llama"][name], parameter), name
        for name, buffer in transformers_model("LlamaForCausalLM").named_buffers():
            assert torch.equal(found["llama buffers"][name], buffer), name


def test_copies_are_alike(ranks: list[dict[str, Any]]) -> None:
    for name, value in ranks[0]["copies"].items():
        assert torch.equal(value, ranks[1]["copies"][name]), name


def test_a_shard_of_another_dimension_is_its_slice(ranks: list[dict[str, Any]]) -> None:
    whole = torch.arange(30.0).view(5, 6)
    assert torch.equal(ranks[0]["columns"], whole[:, :3])
    assert torch.equal(ranks[1]["columns"], whole[:, 3:])
