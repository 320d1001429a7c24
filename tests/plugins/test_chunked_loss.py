# pyright: reportAttributeAccessIssue=false, reportOptionalCall=false, reportArgumentType=false
# pyright: reportOptionalMemberAccess=false
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchmetrics.text import Perplexity

from lightning_memkit import MemoryBudget
from lightning_memkit.loss.lazy_logits import LazyLogits
from lightning_memkit.plugins.callbacks.chunked_loss import ChunkedLoss
from lightning_memkit.plugins.perplexity import LossPerplexity
from tests.plugins.noise import NOISE

pytestmark = NOISE

CLASSES = 40


class Tagger(LightningModule):
    """Its loss is a mean over the labels that are not -100."""

    def __init__(self, late: bool = False, fail: bool = False):
        super().__init__()
        self.fail, self.kinds, self.head = fail, [], None
        self.perplexity, self.usual = LossPerplexity(), Perplexity(ignore_index=-100)
        if late:
            self.configure_model = self._build
        else:
            self._build()

    def _build(self):
        if self.head is None:
            torch.manual_seed(0)
            self.embedding, self.head = nn.Embedding(CLASSES, 16), nn.Linear(16, CLASSES)

    def forward(self, batch):
        logits = self.head(self.embedding(batch["x"]))
        self.kinds.append(type(logits))
        return logits, F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())

    def training_step(self, batch, batch_idx):
        if self.fail:
            raise RuntimeError("a step that fails")
        return self(batch)[1]

    def validation_step(self, batch, batch_idx):
        logits, loss = self(batch)
        self.perplexity.update(loss, (batch["labels"] != -100).sum())
        self.usual.update(logits + 0, batch["labels"])
        self.log("perplexity", self.perplexity)
        self.log("usual", self.usual)

    test_step = validation_step

    def predict_step(self, batch, batch_idx):
        return self(batch)[0]

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def loader(batch_size=4):
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(CLASSES, (16, 6), generator=generator)
    y = torch.randint(CLASSES, (16, 6), generator=generator)
    lengths = torch.randint(1, 7, (16, 1), generator=generator)
    y[torch.arange(6) >= lengths] = -100
    return DataLoader([{"x": a, "labels": b} for a, b in zip(x, y, strict=True)], batch_size=batch_size)


def trainer(tmp_path, *callbacks):
    return Trainer(
        max_epochs=2,
        accelerator="cpu",
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        default_root_dir=tmp_path,
    )


def fit(model, tmp_path, *callbacks):
    trainer(tmp_path, *callbacks).fit(model, loader(), loader())
    return model


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("late", [False, True], ids=["built in __init__", "built in configure_model"])
def test_training_is_the_same_up_to_rounding_and_undone(late, tmp_path):
    plain = fit(Tagger(late), tmp_path)
    ours = fit(Tagger(late), tmp_path, ChunkedLoss(heads=["head"]))
    assert set(plain.kinds) == {torch.Tensor}
    assert set(ours.kinds) == {LazyLogits}
    torch.testing.assert_close(weights(ours), weights(plain))
    assert "forward" not in vars(ours.head)


def test_under_a_budget_parts_are_weighed_by_their_labels(tmp_path):
    plain = fit(Tagger(), tmp_path)
    budget = MemoryBudget("1GiB", micro_batch_size=1)
    ours = fit(Tagger(), tmp_path, budget, ChunkedLoss(heads=["head"]))
    assert budget.history[-1].micro_batch_size == 1
    assert set(ours.kinds) == {LazyLogits}
    torch.testing.assert_close(weights(ours), weights(plain), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("run", ["validate", "test"])
def test_validation_and_tests_alone(run, tmp_path):
    for late in (False, True):
        model = Tagger(late)
        found = getattr(trainer(tmp_path, ChunkedLoss(heads=["head"])), run)(model, loader(), verbose=False)
        assert set(model.kinds) == {LazyLogits}
        assert found[0]["perplexity"] == pytest.approx(found[0]["usual"], rel=1e-5)
        assert "forward" not in vars(model.head)


def test_prediction_is_left_alone(tmp_path):
    model = Tagger()
    trainer(tmp_path, ChunkedLoss(heads=["head"])).predict(model, loader())
    assert set(model.kinds) == {torch.Tensor}


def test_an_error_in_a_step_undoes_the_patch(tmp_path):
    model = Tagger(fail=True)
    with pytest.raises(RuntimeError, match="a step that fails"):
        fit(model, tmp_path, ChunkedLoss(heads=["head"]))
    assert "forward" not in vars(model.head)


def test_one_callback_serves_two_fits(tmp_path):
    callback = ChunkedLoss(heads=["head"])
    for _ in range(2):
        assert set(fit(Tagger(), tmp_path, callback).kinds) == {LazyLogits}


def test_a_module_without_a_known_head_is_refused_at_setup(tmp_path):
    with pytest.raises(ValueError, match=r'as in heads=\["head"\]'):
        fit(Tagger(), tmp_path, ChunkedLoss())


def test_bad_options_are_refused_at_construction():
    with pytest.raises(ValueError, match=r"write heads=\['head'\]"):
        ChunkedLoss(heads="head")
    with pytest.raises(ValueError, match="choose one of"):
        ChunkedLoss(backend="triton")


def test_repr_round_trips():
    callback = ChunkedLoss(heads=["head"], backend="memkit")
    assert vars(eval(repr(callback))) == vars(callback)
