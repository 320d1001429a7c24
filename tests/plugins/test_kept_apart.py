"""A model of transformers on packed rows: trained as with packed attention, without a line of the user's."""

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_memkit import NoEffectWarning, PackedDataModule, use_packed_attention
from lightning_memkit.attention.contamination import ContaminationError, probe_contamination
from lightning_memkit.data.sources.shares import DocumentOptions
from tests.plugins.noise import NOISE
from tests.plugins.toys import trainer

pytestmark = [*NOISE, pytest.mark.filterwarnings("ignore:You passed in a `val_dataloader`")]
transformers = pytest.importorskip("transformers")
LINE = "LlamaForCausalLM uses packed_attention in this fit"
IN_EVALUATION = "LlamaForCausalLM uses packed_attention in this evaluation"
DOCUMENTS = [[int(token) for token in torch.arange(5 + i % 9) * (i % 7 + 1) % 60] for i in range(120)]


class Language(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2}
        self.model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=64, **sizes))
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.model(**batch).loss

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(self.model(**batch).loss))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Evaluated(Language):
    """Its steps log, and take different arguments."""

    def test_step(self, batch: Any, batch_idx: int) -> None:
        super().test_step(batch, batch_idx)
        self.log("loss", self.losses[-1], batch_size=1)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.test_step(batch, batch_idx)

    def predict_step(self, batch: Any) -> Tensor:
        return self.model(**batch).logits


class Plain(LightningModule):
    """No model of transformers."""

    batches = 0

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.batches += 1


class Untold(Language):
    """Its model hears nothing of documents."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.model(input_ids=batch["input_ids"], labels=batch["labels"]).loss

    def predict_step(self, batch: Any) -> Tensor:
        return self.model(input_ids=batch["input_ids"]).logits


class Failing(Language):
    def on_train_batch_end(self, *_: Any) -> None:
        raise RuntimeError("the user's own")


def data() -> PackedDataModule:
    return PackedDataModule({"train": DOCUMENTS, "test": DOCUMENTS[:40]}, context=32, batch_size=4)


def attention_of(module: Language) -> str:
    return str(module.model.config._attn_implementation)


def test_it_is_trained_and_tested_as_with_packed_attention(caplog: pytest.LogCaptureFixture) -> None:
    ours, theirs = Language(), Language()
    own = attention_of(ours)
    undo = use_packed_attention(theirs)
    found: list[Any] = []
    for module in (ours, theirs):
        given, fitted = data(), trainer(max_steps=4)
        caplog.clear()
        with caplog.at_level("INFO", logger="lightning.pytorch.utilities.rank_zero"):
            fitted.fit(module, datamodule=given)
        found.append(LINE in caplog.text)
        assert attention_of(module) == (own if module is ours else attention_of(theirs))
        fitted.test(module, datamodule=given, verbose=False)
    undo()
    assert found == [True, False]
    assert attention_of(ours) == attention_of(theirs) == own
    assert all(torch.equal(*pair) for pair in zip(ours.parameters(), theirs.parameters(), strict=True))
    assert ours.losses == theirs.losses
    assert len(ours.losses) > 0


@pytest.mark.parametrize("what", ["validate", "test", "predict"])
def test_an_evaluation_without_a_fit_is_one_with_packed_attention(
    what: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It says so in a line, logs each value once, draws nothing, and leaves the model as it was."""
    ours, theirs = Evaluated(), Evaluated()
    own, undo = attention_of(ours), use_packed_attention(theirs)
    found: list[Any] = []
    for module in (ours, theirs):
        caplog.clear()
        torch.manual_seed(7)
        seen = PackedDataModule(
            {"train": DOCUMENTS, "validation": DOCUMENTS[:40], "test": DOCUMENTS[:40]},
            context=32,
            batch_size=4,
        )
        shown = {} if what == "predict" else {"verbose": False}
        with caplog.at_level("INFO", logger="lightning.pytorch.utilities.rank_zero"):
            result = getattr(trainer(), what)(module, datamodule=seen, **shown)
        found.append((result, torch.rand(()), IN_EVALUATION in caplog.text))
    undo()
    (result, drawn, said), (expected, expected_draw, expected_said) = found
    assert said
    assert not expected_said
    assert attention_of(ours) == own
    assert not ours.model._forward_pre_hooks
    assert ours.losses == theirs.losses
    assert torch.equal(drawn, expected_draw)
    if what == "predict":
        assert all(map(torch.equal, result, expected))
    else:
        assert result == expected
        assert len(ours.losses) > 0


LONE = [list(range(1, 21 if number % 2 else 29)) for number in range(40)]  # no two have room in a row of 32


def test_a_row_of_one_document_and_padding_tells_nothing() -> None:
    """What follows a document can't be seen by it: the first row of two documents decides."""
    module = Language()
    given = PackedDataModule({"test": LONE}, context=32, batch_size=4)
    given.setup("test")
    batches: Any = given.test_dataloader()
    assert not any(probe_contamination(module, batch) for batch in batches)
    mixed = PackedDataModule({"test": [*LONE, *DOCUMENTS[:4]]}, context=32, batch_size=1)
    mixed.setup("test")
    rows: Any = list(mixed.test_dataloader())
    first = next(number for number, row in enumerate(rows) if row.documents > 1)
    assert first > 1
    trainer().test(module, datamodule=mixed, verbose=False)
    undo = use_packed_attention(theirs := Language())
    trainer().test(theirs, datamodule=mixed, verbose=False)
    undo()
    assert module.losses == theirs.losses


def test_evaluations_in_turn_are_each_as_with_packed_attention_and_one_line_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    given, module, other = data(), Language(), Untold()
    with caplog.at_level("INFO", logger="lightning.pytorch.utilities.rank_zero"):
        for _ in range(2):
            trainer().test(module, datamodule=given, verbose=False)
    assert caplog.text.count(IN_EVALUATION) == 1
    assert module.losses[: len(module.losses) // 2] == module.losses[len(module.losses) // 2 :]
    with pytest.raises(ContaminationError):  # another module, that is told nothing
        trainer().predict(other, datamodule=given)


def test_a_module_that_steps_its_optimizer_itself_is_evaluated_like_any_other() -> None:
    module, theirs = Language(), Language()
    for one in (module, theirs):
        one.automatic_optimization = False
    undo = use_packed_attention(theirs)
    for one in (module, theirs):
        trainer().test(one, datamodule=data(), verbose=False)
    undo()
    assert module.losses == theirs.losses


def test_an_evaluation_of_a_model_that_is_not_told_is_refused_before_its_first_batch() -> None:
    module = Untold()
    own = attention_of(module)
    with pytest.raises(ContaminationError, match="Hand the transformers model the whole batch"):
        trainer().predict(module, datamodule=data())
    assert attention_of(module) == own
    assert not module.model._forward_pre_hooks


def test_what_keeps_documents_apart_in_evaluation_is_evaluated_whatever_it_does_in_training() -> None:
    class InTraining(Language):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            raise AssertionError("an evaluation asks for no training step")

    module = InTraining()
    undo = use_packed_attention(module)
    trainer().test(module, datamodule=data(), verbose=False)
    undo()
    assert len(module.losses) > 0


def test_a_model_that_is_not_told_where_documents_end_is_refused_and_left_as_it_was() -> None:
    module = Untold()
    own = attention_of(module)
    with pytest.raises(
        ContaminationError, match=r"Hand the transformers model the whole batch, model\(\*\*batch\)"
    ):
        trainer(max_steps=2).fit(module, datamodule=data())
    assert attention_of(module) == own
    assert not module.model._forward_pre_hooks


def test_a_fit_that_fails_leaves_the_model_as_it_was() -> None:
    module = Failing()
    own = attention_of(module)
    with pytest.raises(RuntimeError, match="the user's own"):
        trainer(max_steps=2).fit(module, datamodule=data())
    assert attention_of(module) == own
    assert not module.model._forward_pre_hooks


def test_what_is_tested_later_may_have_packed_attention_already_or_need_none() -> None:
    """The data module remembers that a fit needed it; the next module may be another."""
    given, module = data(), Language()
    trainer(max_steps=1).fit(module, datamodule=given)
    undo = use_packed_attention(module)
    trainer().test(module, datamodule=given, verbose=False)
    assert attention_of(module).startswith("memkit")
    undo()
    other = Plain()
    with pytest.warns(NoEffectWarning, match="Plain could not be probed"):
        trainer().test(other, datamodule=given, verbose=False)
    assert other.batches > 0


def test_whoever_asks_not_to_be_probed_is_left_alone() -> None:
    module = Language()
    seen: list[str] = []
    module.on_train_batch_end = lambda *_: seen.append(attention_of(module))  # pyright: ignore
    given = PackedDataModule(
        {"train": DOCUMENTS}, context=32, batch_size=4, documents=DocumentOptions(kept_apart=False)
    )
    trainer(max_steps=1).fit(module, datamodule=given)
    assert seen == [attention_of(module)]
    given = PackedDataModule(
        {"test": DOCUMENTS}, context=32, batch_size=4, documents=DocumentOptions(kept_apart=False)
    )
    trainer().test(module, datamodule=given, verbose=False)
    batches: Any = given.test_dataloader()
    assert len(module.losses) == len(batches)


CAN_NOT_BE_PACKED: dict[str, tuple[dict[str, Any], str]] = {
    "BloomForCausalLM": ({"hidden_size": 16, "n_layer": 1, "n_head": 2}, "without transformers' interface"),
    "GPTJForCausalLM": ({"n_embd": 16, "n_layer": 1, "n_head": 2, "rotary_dim": 4}, "without transformers' interface"),
    "BartForCausalLM": (
        {"d_model": 16, "decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 16},
        r"\.forward takes no position_ids",
    ),
    "GptOssForCausalLM": (
        {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
         "num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 4},
        "GptOssAttention adds s_aux to its scores",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CAN_NOT_BE_PACKED)
def test_where_packed_attention_is_refused_the_error_names_what_works(name: str) -> None:
    """And that works: each document in its own row."""
    options, reason = CAN_NOT_BE_PACKED[name]
    cls = getattr(transformers, name)

    class Its(Language):
        def __init__(self) -> None:
            super().__init__()
            self.model = cls(cls.config_class(vocab_size=64, pad_token_id=0, eos_token_id=1, **options))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.model(input_ids=batch["input_ids"], labels=batch["labels"], use_cache=False).loss

    module = Its()
    own = attention_of(module)
    rule = rf'{reason}: give each document its own row, packing="none" \(data\.init_args\.packing: none\)\.$'
    with pytest.raises(ContaminationError, match=rule) as caught:
        trainer(max_steps=2).fit(module, datamodule=data())
    assert "use_packed_attention" not in str(caught.value)
    assert len(str(caught.value)) <= 3 * 120
    assert attention_of(module) == own
    assert not module.model._forward_pre_hooks
    given = PackedDataModule({"train": DOCUMENTS}, context=32, batch_size=4, packing="none")
    fitted = trainer(max_steps=2)
    fitted.fit(module, datamodule=given)
    assert fitted.global_step == 2
