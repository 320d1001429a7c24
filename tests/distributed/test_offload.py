"""Activation offload on two ranks: the gradients of the same ranks without it, and no gathered parameter moves."""

import pytest

from tests.distributed.launch import two_ranks


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return two_ranks("two_ranks_offload", tmp_path_factory.mktemp("offload"))


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "fsdp2 nested"])
def test_gradients_are_bitwise_the_same_and_just_the_activations_move(found, kind, checkpointed):
    for rank in ("rank 0", "rank 1"):
        here, alone = found[rank][f"{kind} {checkpointed}"], found[rank][f"alone {checkpointed}"]
        assert here["same"]
        assert here["again"]
        assert here["moved"] == alone["moved"] > 0


@pytest.mark.parametrize("checkpointed", [False, True])
def test_parameters_gathered_in_half_precision_do_not_move(found, checkpointed):
    for rank in ("rank 0", "rank 1"):
        here, alone = found[rank][f"fsdp2 mixed {checkpointed}"], found[rank][f"alone {checkpointed}"]
        assert here["same"]
        assert 0 < here["moved"] < alone["moved"]
