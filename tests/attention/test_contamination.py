"""The probe catches every way in which packed documents may see each other, names the place, and leaves no trace."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_memkit.attention import packed_attention
from lightning_memkit.attention.adapters import use_packed_attention
from lightning_memkit.attention.contamination import ContaminationError, probe_contamination, probed_rows
from lightning_memkit.data.batching.batch import PackedBatch
from lightning_memkit.utilities.errors import NoEffectWarning
from tests.attention.test_transformers import SEVEN, model_of, packed


@pytest.mark.parametrize("name", SEVEN)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.long
def test_transformers_own_path_is_caught_and_ours_passes(name, training):
    """A model as from_pretrained gives it, told positions as its documentation says; then switched."""
    model, batch = model_of(name).train(training), packed()

    def own(part: PackedBatch) -> Any:
        return model(part["input_ids"], position_ids=part["position_ids"], labels=part["labels"]).loss

    message = r"other documents, .*use_packed_attention\(model\)"
    with pytest.raises(ContaminationError, match=message) as caught:
        probe_contamination(model, batch, own)
    assert "layers.0" in str(caught.value) or "h.0" in str(caught.value)
    use_packed_attention(model)
    assert probe_contamination(model, batch)
    assert probe_contamination(model, batch, own)


def test_a_switched_model_that_is_not_told_documents_is_caught():
    model, batch = model_of("LlamaForCausalLM"), packed()
    use_packed_attention(model)
    with pytest.raises(ContaminationError, match="it is not told cu_seqlens"):
        probe_contamination(model, batch, lambda part: model(part["input_ids"]).logits)


class Model(nn.Module):
    """An embedding, attention of some kind, a head, a loss; nothing but the loss is returned."""

    def __init__(self, attend: Any = packed_attention) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(128, 16)
        self.attention = SomeAttention(attend)
        self.head = nn.Linear(16, 128)

    def training_step(self, batch: PackedBatch, batch_idx: int) -> Tensor:
        hidden = self.embedding(batch["input_ids"])
        logits = self.head(hidden + self.attention(hidden, batch))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


class SomeAttention(nn.Module):
    def __init__(self, attend: Any) -> None:
        super().__init__()
        self.attend = attend
        self.inside, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, hidden: Tensor, batch: PackedBatch) -> Tensor:
        query, key, value = self.inside(hidden).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        return self.out(self.attend(query, key, value, batch["cu_seqlens"]).transpose(1, 2).flatten(2))


def whole_rows(query: Tensor, key: Tensor, value: Tensor, bounds: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def backwards(query: Tensor, key: Tensor, value: Tensor, bounds: Tensor) -> Tensor:
    """A token sees those after it, to the row's end."""
    return whole_rows(query.flip(2), key.flip(2), value.flip(2), bounds).flip(2)


def off_by_one(query: Tensor, key: Tensor, value: Tensor, bounds: Tensor) -> Tensor:
    inside = (bounds > 0) & (bounds < bounds[-1])
    return packed_attention(query, key, value, torch.where(inside, bounds - (bounds % 16 > 1).int(), bounds))


def between_rows(query: Tensor, key: Tensor, value: Tensor, bounds: Tensor) -> Tensor:
    return packed_attention(query, key, value + 0.1 * value.flip(0), bounds)


def padding_seen(query: Tensor, key: Tensor, value: Tensor, bounds: Tensor) -> Tensor:
    """The last document of the second row sees the padding behind it."""
    return packed_attention(query, key, value, torch.cat((bounds[:6], bounds[7:])), causal=False)


def padding_before(query: Tensor, key: Tensor, value: Tensor, bounds: Tensor) -> Tensor:
    """The padding of the second row sees the document before it."""
    return packed_attention(query, key, value, torch.cat((bounds[:6], bounds[7:])))


def neighbour_seen(query: Tensor, key: Tensor, value: Tensor, bounds: Tensor) -> Tensor:
    """One even document alone sees the odd one before it."""
    return packed_attention(query, key, value, torch.cat((bounds[:2], bounds[3:])))


@pytest.mark.parametrize(
    "attend", [neighbour_seen, whole_rows, backwards, off_by_one, between_rows, padding_seen]
)
def test_a_leak_of_any_direction_is_caught_and_its_module_named(attend):
    message = r"other documents, .* First seen in the output of attention.out \(Linear\)"
    with pytest.raises(ContaminationError, match=message):
        probe_contamination(Model(attend), packed())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("attend", [whole_rows, neighbour_seen, backwards])
def test_a_leak_behind_weights_that_are_zero_at_first_is_caught(attend, dtype):
    """Many models begin with projections of zeros, so that no output shows what attention saw."""
    model = Model(attend)
    nn.init.zeros_(model.attention.out.weight)
    message = r"First seen in the input of attention.out \(Linear\)"
    with pytest.raises(ContaminationError, match=message):
        probe_contamination(model.to(dtype), packed())


@pytest.mark.parametrize("attend", [packed_attention, padding_before])
def test_documents_kept_apart_pass_behind_weights_that_are_zero(attend):
    model = Model(attend)
    nn.init.zeros_(model.attention.out.weight)
    assert probe_contamination(model, packed())


def test_an_input_in_another_order_is_no_leak():
    """The loss of a model that puts tokens before rows is handed logits in the order of tokens."""

    class TokensFirst(Model):
        def __init__(self) -> None:
            super().__init__()
            self.loss = nn.CrossEntropyLoss()

        def training_step(self, batch: PackedBatch, batch_idx: int) -> Tensor:
            hidden = self.embedding(batch["input_ids"])
            logits = self.head(hidden + self.attention(hidden, batch)).transpose(0, 1)
            labels = F.pad(batch["labels"], (0, 1), value=-100)[:, 1:].T
            return self.loss(logits.flatten(0, 1), labels.flatten())

    assert probe_contamination(TokensFirst(), packed())


def test_the_document_is_named():
    with pytest.raises(ContaminationError, match="tokens 3 to 12 of row 1 change"):
        probe_contamination(Model(padding_seen), packed())


def test_documents_kept_apart_pass():
    assert probe_contamination(Model(), packed())


def test_padding_may_see_the_document_before_it():
    assert probe_contamination(Model(padding_before), packed())


class SortedTokens(Model):
    """As with experts, tokens are moved about in between: the places of other documents' tokens change them."""

    def training_step(self, batch: PackedBatch, batch_idx: int) -> Tensor:
        order = batch["input_ids"].flatten().argsort(stable=True)
        hidden = self.embedding(batch["input_ids"])
        inside = torch.zeros_like(hidden.flatten(0, 1))
        inside[order] = self.attention.out(hidden.flatten(0, 1)[order])
        return F.cross_entropy(self.head(inside.view_as(hidden)).flatten(0, 1), batch["labels"].flatten())


def test_tokens_that_are_sorted_and_put_back_are_no_leak():
    assert probe_contamination(SortedTokens(), packed())


class Functional(nn.Module):
    """No module but itself, and only a loss comes out."""

    def __init__(self, attend: Any, beside: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.beside = nn.Parameter(torch.randn(128, 16)), beside
        self.attend = attend

    def forward(self, **batch: Any) -> dict[str, Tensor]:
        hidden = self.table[batch["input_ids"]]
        heads = hidden.unflatten(-1, (2, 8)).transpose(1, 2)
        hidden = hidden + self.attend(heads, heads, heads, batch["cu_seqlens"]).transpose(1, 2).flatten(2)
        loss = F.cross_entropy(
            (hidden @ self.table.T)[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()
        )
        return {"loss": loss + self.beside * hidden.square().mean()}


@pytest.mark.parametrize("attend", [whole_rows, backwards, between_rows])
def test_the_loss_alone_shows_a_leak(attend):
    with pytest.raises(ContaminationError, match="First seen in the loss, behind the last module"):
        probe_contamination(Functional(attend), packed())


@pytest.mark.parametrize("beside", [0.0, 0.1])
def test_what_is_added_to_the_loss_over_all_tokens_is_no_leak(beside):
    """As the balance of experts is, which depends on every document."""
    assert probe_contamination(Functional(packed_attention, beside), packed())


def test_a_label_across_the_boundary_is_a_leak():
    batch = packed()
    batch["labels"] = batch["input_ids"]
    with pytest.raises(ContaminationError, match="the label of a document's first token counts"):
        probe_contamination(Model(), batch)


@pytest.mark.parametrize("name", ["MixtralForCausalLM"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_are_no_leak(name, dtype):
    model = model_of(name, output_router_logits=True).to(dtype)
    use_packed_attention(model)
    assert probe_contamination(model, packed())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes_catch_and_pass(dtype):
    assert probe_contamination(Model().to(dtype), packed())
    with pytest.raises(ContaminationError):
        probe_contamination(Model(whole_rows).to(dtype), packed())


class Restless(Model):
    """Draws random numbers, counts its steps, updates a buffer and normalises over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.steps, self.history = 0, []
        self.register_buffer("running", torch.zeros(1))
        self.norm, self.drop = nn.BatchNorm1d(16), nn.Dropout(0.5)

    def training_step(self, batch: PackedBatch, batch_idx: int) -> Tensor:
        self.steps += 1
        self.history.append(torch.rand(1))
        self.running += 1
        hidden = self.drop(self.embedding(batch["input_ids"]))
        hidden = self.norm(hidden.flatten(0, 1)).view_as(hidden) + 0 * torch.rand(1)
        logits = self.head(hidden + self.attention(hidden, batch))
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def test_no_trace_is_left():
    model = Restless()
    model.drop.eval()  # a mixed mode is the user's choice
    state = {key: value.clone() for key, value in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    hooks = sum(len(module._forward_hooks) for module in model.modules())
    random = torch.get_rng_state()
    batch = packed()
    given = {key: value.clone() if isinstance(value, Tensor) else value for key, value in batch.items()}
    assert probe_contamination(model, batch)
    assert torch.equal(torch.get_rng_state(), random)
    assert [module.training for module in model.modules()] == modes
    assert (model.steps, model.history) == (0, [])
    assert all(torch.equal(state[key], value) for key, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert sum(len(module._forward_hooks) for module in model.modules()) == hooks
    assert all(torch.equal(value, given[key]) for key, value in batch.items() if isinstance(value, Tensor))


def test_hooks_that_a_forward_adds_are_taken_back():
    """transformers adds hooks in its first forward and notes it: forgotten, it would add them again."""
    model = model_of("MixtralForCausalLM", output_router_logits=True)
    undo = use_packed_attention(model)
    expected = model_of("MixtralForCausalLM", output_router_logits=True)
    assert probe_contamination(model, packed())
    undo()
    tokens = packed()["input_ids"]
    ours, theirs = (each(tokens).router_logits for each in (model, expected))
    assert len(ours) == len(theirs)


def test_no_trace_is_left_of_a_leak_or_a_failure():
    model = Model(whole_rows)
    modes = [module.training for module in model.modules()]

    def failing(part: PackedBatch) -> None:
        raise KeyError("mine")

    with pytest.raises(ContaminationError):
        probe_contamination(model, packed())
    with pytest.raises(KeyError, match="mine"):
        probe_contamination(model, packed(), failing)
    assert [module.training for module in model.modules()] == modes
    assert not any(module._forward_hooks for module in model.modules())


def test_a_leak_in_evaluation_alone_is_warned_of():
    model = Model()
    model.attention.attend = lambda *args: (packed_attention if model.training else whole_rows)(*args)
    with pytest.warns(
        UserWarning, match="in evaluation they see each other, first in the output of attention.out"
    ):
        assert probe_contamination(model, packed())


class Blind(nn.Module):
    def forward(self, **batch: Any) -> Tensor:
        return batch["input_ids"].float().mean()


def test_where_nothing_can_be_followed_that_is_said():
    batch = packed()
    del batch["labels"]
    with pytest.warns(NoEffectWarning, match="Blind could not be probed"):
        assert not probe_contamination(Blind(), batch)


def test_two_rows_with_the_most_documents_are_probed():
    batch = packed()
    assert (rows := probed_rows(batch)) is not None
    assert rows.rows == 2
    single = PackedBatch({**batch, "cu_seqlens": torch.tensor([0, 16, 32])})
    assert probed_rows(single) is None
    assert not probe_contamination(Model(whole_rows), single)
    four = PackedBatch(
        {key: torch.cat((value, value)) for key, value in batch.items() if key in ("input_ids", "labels")},
        position_ids=torch.cat((torch.arange(16).expand(2, -1), batch["position_ids"])),
        cu_seqlens=torch.tensor([0, 16, 32, *(32 + batch["cu_seqlens"][1:]).tolist()]),
        max_seqlen=16,
    )
    assert (rows := probed_rows(four)) is not None
    assert rows["cu_seqlens"].tolist() == batch["cu_seqlens"].tolist()


def test_ranks_make_equal_numbers_of_forwards():
    """The rank without a leak runs what the rank with one runs, and stops too."""

    steps: list[int] = []  # not the module's own, which the probe puts back

    class Counting(Model):
        def training_step(self, batch: PackedBatch, batch_idx: int) -> Tensor:
            steps.append(batch_idx)
            return super().training_step(batch, batch_idx)

    forwards, answers = [], [[], []]
    for rank, attend in enumerate((whole_rows, packed_attention)):
        steps.clear()
        recorded = iter(answers[0]) if rank else None

        def agree(truth: bool, rank: int = rank, recorded: Any = recorded) -> bool:
            answers[rank].append(truth)
            return truth if recorded is None else bool(truth or next(recorded))

        with pytest.raises(ContaminationError, match="on another rank" if rank else "row 1"):
            probe_contamination(Counting(attend), packed(), agree=agree)
        forwards.append(len(steps))
    assert forwards[0] == forwards[1] > 4
    assert len(answers[0]) == len(answers[1])
