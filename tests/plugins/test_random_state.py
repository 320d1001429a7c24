# pyright: reportArgumentType=false
import itertools
import random

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_memkit.plugins.callbacks.random_state import KEY, RandomState, capture, restore
from tests.plugins.noise import NOISE

pytestmark = NOISE
CPU = torch.device("cpu")


class Rows(Dataset):
    """Rows with noise from all three generators, drawn when a row is read."""

    def __init__(self, noise=True):
        self.rows = torch.arange(8.0).repeat(4, 1).T.contiguous()
        self.noise = noise

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        noise = random.random() + np.random.rand() + np.random.randn() + torch.rand(()) if self.noise else 0.0
        return self.rows[index] + torch.as_tensor(noise).float()


class Resumable(DataLoader):
    """A shuffled loader that can continue within an epoch: it keeps its order and its position."""

    def __init__(self, dataset, lazy=False):
        super().__init__(dataset, batch_size=2)
        self.order, self.position, self.continues, self.lazy = [], 0, False, lazy

    def __iter__(self):
        batches = self.batches()
        if not self.lazy:  # draw the order when the iterator is made, else with the first batch
            next(batches)
            return batches
        return itertools.islice(batches, 1, None)

    def batches(self):
        fresh = torch.randperm(len(self.dataset)).tolist()
        if self.continues:
            self.continues = False
        else:
            self.order, self.position = fresh, 0
        yield
        while self.position < len(self.dataset):
            rows = [self.dataset[index] for index in self.order[self.position : self.position + 2]]
            self.position += 2
            yield torch.stack(rows)

    def state_dict(self):
        return {"order": self.order, "position": self.position}

    def load_state_dict(self, state):
        self.order, self.position = state["order"], state["position"]
        self.continues = self.position < len(self.dataset)


class Model(LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.network = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.5), nn.Linear(16, 1))

    def training_step(self, batch, batch_idx):
        return self.network(batch).square().mean()

    def validation_step(self, batch, batch_idx):
        self.log("score", torch.rand(()))  # validation draws, too

    def configure_optimizers(self):
        torch.rand(3)  # a draw that the uninterrupted run makes once
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class SaveAt(Callback):
    """Saves a checkpoint in one hook, at one step."""

    def __init__(self, hook, step, path):
        self.path = path
        setattr(self, hook, lambda trainer, *_: self.save(trainer, step))

    def save(self, trainer, step):
        if (
            trainer.global_step == step
            and trainer.training
            or trainer.global_step == step
            and trainer.validating
        ):
            trainer.save_checkpoint(self.path)


def fit(tmp_path, callbacks, loader, *, ckpt_path=None, epochs=3, validate=False):
    trainer = Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=any(isinstance(callback, ModelCheckpoint) for callback in callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    model = Model()
    torch.manual_seed(1 if ckpt_path is None else 2)  # a resumed run starts from other numbers
    random.seed(3 if ckpt_path is None else 4)
    np.random.seed(5 if ckpt_path is None else 6)
    trainer.fit(model, loader, DataLoader(Rows(), 2) if validate else None, ckpt_path=ckpt_path)
    assert trainer.global_step == 4 * epochs
    return torch.cat([p.detach().flatten() for p in model.parameters()]), torch.get_rng_state()


def shuffled():
    return DataLoader(Rows(), batch_size=2, shuffle=True)


CASES = {
    "mid-epoch": ("on_train_batch_end", 6, lambda: Resumable(Rows()), False),
    "mid-epoch, order drawn late": (
        "on_train_batch_end",
        6,
        lambda: Resumable(Rows(False), lazy=True),
        False,
    ),
    "mid-epoch, first step": ("on_train_batch_end", 1, lambda: Resumable(Rows(False)), False),
    "mid-epoch with validation": ("on_train_batch_end", 6, lambda: Resumable(Rows()), True),
    "epoch boundary": ("on_train_epoch_end", 8, shuffled, False),
    "epoch boundary, resumable loader": ("on_train_epoch_end", 8, lambda: Resumable(Rows()), False),
    "epoch boundary with validation": ("on_train_epoch_end", 8, shuffled, True),
    "end of validation": ("on_validation_end", 8, shuffled, True),
    "last batch of an epoch": ("on_train_batch_end", 8, shuffled, False),
    "first epoch's end": ("on_train_epoch_end", 4, shuffled, False),
}


@pytest.mark.parametrize("case", CASES)
def test_a_resumed_run_equals_the_uninterrupted_one_bitwise(case, tmp_path):
    hook, step, loader, validate = CASES[case]
    path = tmp_path / "saved.ckpt"
    whole, numbers = fit(tmp_path, [RandomState(), SaveAt(hook, step, path)], loader(), validate=validate)
    resumed, numbers_after = fit(tmp_path, [RandomState()], loader(), ckpt_path=path, validate=validate)
    assert torch.equal(resumed, whole)
    assert torch.equal(numbers_after, numbers)
    without, _ = fit(tmp_path, [], loader(), ckpt_path=path, validate=validate)
    assert not torch.equal(without, whole)


def test_a_finished_run_is_continued(tmp_path):
    whole, _ = fit(tmp_path, [RandomState()], shuffled())
    keep = ModelCheckpoint(tmp_path, save_last=True)
    fit(tmp_path, [RandomState(), keep], shuffled(), epochs=1)
    again = ModelCheckpoint(tmp_path, save_last=True)
    resumed, _ = fit(tmp_path, [RandomState(), again], shuffled(), ckpt_path=keep.last_model_path)
    assert torch.equal(resumed, whole)


def test_the_state_loads_under_weights_only(tmp_path):
    path = tmp_path / "saved.ckpt"
    fit(tmp_path, [RandomState(), SaveAt("on_train_batch_end", 2, path)], shuffled(), epochs=1)
    states = torch.load(path, weights_only=True)[KEY]["ranks"]
    assert len(states) == 1
    assert states[0].keys() == {"python", "numpy", "torch", "device_type"}


def test_all_three_generators_go_on_where_they_were():
    random.gauss(0, 1)  # leaves half a pair behind
    np.random.randn()
    state = capture(CPU)
    draw = lambda: (random.gauss(0, 1), random.random(), np.random.randn(), np.random.rand(), torch.rand(3))  # noqa: E731
    first = draw()
    draw()
    restore(state, CPU)
    second = draw()
    assert first[:4] == second[:4]
    assert torch.equal(first[4], second[4])


def test_another_number_of_ranks_is_said(tmp_path):
    path = tmp_path / "saved.ckpt"
    fit(tmp_path, [RandomState(), SaveAt("on_train_epoch_end", 4, path)], shuffled(), epochs=1)
    checkpoint = torch.load(path, weights_only=True)
    checkpoint[KEY]["ranks"] *= 2
    torch.save(checkpoint, path)
    with pytest.warns(UserWarning, match="random states of 2 ranks and this run has 1"):
        fit(tmp_path, [RandomState()], shuffled(), ckpt_path=path, epochs=2)


def test_a_checkpoint_without_the_state_resumes(tmp_path):
    path = tmp_path / "saved.ckpt"
    fit(tmp_path, [SaveAt("on_train_epoch_end", 4, path)], shuffled(), epochs=1)
    assert KEY not in torch.load(path, weights_only=True)
    fit(tmp_path, [RandomState()], shuffled(), ckpt_path=path, epochs=2)
