# pyright: reportAttributeAccessIssue=false, reportOptionalCall=false, reportArgumentType=false
# pyright: reportOptionalMemberAccess=false
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader

from lightning_memkit import ActivationCheckpointing, MemoryBudget, NoEffectWarning
from tests.activations.models import VOCABULARY, Stack
from tests.plugins.noise import NOISE

pytestmark = NOISE


class Model(LightningModule):
    def __init__(self, late: bool = False, fail: bool = False):
        super().__init__()
        self.fail = fail
        self.calls = 0
        self.network = None if late else self.build()
        if late:
            self.configure_model = self._build_late

    def build(self):
        torch.manual_seed(0)
        network = Stack(depth=2)
        network.blocks[0].mix.register_forward_hook(self.count)
        return network

    def _build_late(self):
        if self.network is None:
            self.network = self.build()

    def count(self, *_):
        self.calls += 1

    def training_step(self, batch, batch_idx):
        if self.fail:
            raise RuntimeError("a step that fails")
        return self.network(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def fit(model, *callbacks, tmp_path):
    data = torch.randint(VOCABULARY, (6, 8), generator=torch.Generator().manual_seed(0))
    trainer = Trainer(
        max_steps=3,
        accelerator="cpu",
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        default_root_dir=tmp_path,
    )
    loader = DataLoader(data, batch_size=2)
    torch.manual_seed(1)
    trainer.fit(model, loader)
    return model


@pytest.mark.parametrize("late", [False, True], ids=["built in __init__", "built in configure_model"])
def test_training_is_bitwise_the_same_and_undone(late, tmp_path):
    plain = fit(Model(late), tmp_path=tmp_path)
    ours = fit(Model(late), ActivationCheckpointing(), tmp_path=tmp_path)
    assert plain.calls == 3
    assert ours.calls == 6
    for name, value in plain.state_dict().items():
        assert torch.equal(ours.state_dict()[name], value), name
    assert "forward" not in ours.network.blocks[0].__dict__


@pytest.mark.parametrize("policy", ["selective", "budget:0.5"])
def test_policies_by_operator_train_bitwise_the_same_without_a_second_forward(policy, tmp_path):
    plain = fit(Model(), tmp_path=tmp_path)
    ours = fit(Model(), ActivationCheckpointing(policy), tmp_path=tmp_path)
    assert ours.calls == plain.calls
    for name, value in plain.state_dict().items():
        assert torch.equal(ours.state_dict()[name], value), name
    assert "training_step" not in ours.__dict__
    assert "forward" not in ours.network.blocks[0].__dict__


def test_auto_takes_the_bytes_of_the_memory_budget(tmp_path):
    callbacks = [ActivationCheckpointing(policy="auto"), MemoryBudget("1GiB", micro_batch_size=2)]
    plain = fit(Model(), MemoryBudget("1GiB", micro_batch_size=2), tmp_path=tmp_path)
    ours = fit(Model(), *callbacks, tmp_path=tmp_path)
    for name, value in plain.state_dict().items():
        assert torch.equal(ours.state_dict()[name], value), name


def test_auto_without_a_budget_is_refused(tmp_path):
    with pytest.raises(ValueError, match="finds no budget: put a MemoryBudget among the callbacks"):
        fit(Model(), ActivationCheckpointing(policy="auto"), tmp_path=tmp_path)


def test_an_error_in_a_step_undoes_the_patch(tmp_path):
    model = Model(fail=True)
    with pytest.raises(RuntimeError, match="a step that fails"):
        fit(model, ActivationCheckpointing(), tmp_path=tmp_path)
    assert "forward" not in model.network.blocks[0].__dict__


def test_one_callback_serves_two_fits(tmp_path):
    callback = ActivationCheckpointing(policy="every:2")
    assert fit(Model(), callback, tmp_path=tmp_path).calls == 6
    assert fit(Model(), callback, tmp_path=tmp_path).calls == 6


def test_no_match_is_reported_once(tmp_path):
    with pytest.warns(NoEffectWarning, match=r"2 Block \(network\.blocks\.0") as caught:
        fit(Model(), ActivationCheckpointing(blocks=["Attention"]), tmp_path=tmp_path)
    assert len([w for w in caught if w.category is NoEffectWarning]) == 1


@pytest.mark.filterwarnings("ignore:Found .* in eval mode at the start of training:UserWarning")
def test_blocks_that_all_are_in_eval_mode_are_reported(tmp_path):
    model = Model()
    model.eval()
    with pytest.warns(NoEffectWarning, match=r"All 2 blocks are in eval mode.*train\(\)"):
        assert fit(model, ActivationCheckpointing(), tmp_path=tmp_path).calls == 3
    model = Model()
    model.network.blocks[1].eval()  # one that is meant to be
    assert fit(model, ActivationCheckpointing(), tmp_path=tmp_path).calls == 6


def test_a_bad_policy_is_refused_at_construction():
    with pytest.raises(ValueError, match="the policies are"):
        ActivationCheckpointing(policy="half")


def test_repr_round_trips():
    callback = ActivationCheckpointing(policy="every:3", blocks=["A*"])
    assert vars(eval(repr(callback))) == vars(callback)


def test_one_string_as_blocks_is_refused_at_construction():
    with pytest.raises(ValueError, match=r"write blocks=\['LlamaDecoderLayer'\]"):
        ActivationCheckpointing(blocks="LlamaDecoderLayer")
