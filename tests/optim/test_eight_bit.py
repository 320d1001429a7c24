# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false
"""bitsandbytes' optimizers under memkit: what keeps 32 bits, overrides, paging, resume, bytes."""

import copy
import gc
import io
import warnings
import weakref
from functools import partial
from itertools import product

import bitsandbytes as bnb
import pytest
import torch
from bitsandbytes import functional
from bitsandbytes.optim import GlobalOptimManager
from torch import nn
from torch.nn import Parameter

from lightning_memkit.optim import eight_bit
from lightning_memkit.optim.bytes_per_parameter import bytes_per_parameter
from lightning_memkit.optim.compensation import compensate
from lightning_memkit.optim.eight_bit import (
    adapt_bitsandbytes,
    adapter_of,
    dequantize_,
    is_bitsandbytes,
)
from lightning_memkit.optim.pieces import slots
from lightning_memkit.optim.snapshots import (
    forget_new_states,
    known_states,
    restore_snapshot,
    take_snapshot,
)
from lightning_memkit.optim.step_copies import StepCopies, WholeStepCopies
from lightning_memkit.utilities.errors import NoEffectWarning
from tests.optim.helpers import all_tensors, assert_same_bits, set_gradients
from tests.testing.fake_device import fake_device
from tests.testing.needs import NEEDS_COMPILER

BF16, FP32 = torch.bfloat16, torch.float32
NAMES = {
    "Adam8bit": {},
    "AdamW8bit": {},
    "Lion8bit": {},
    "SGD8bit": {"lr": 0.1, "momentum": 0.9},
    "RMSprop8bit": {},
    "Adagrad8bit": {},
    "AdEMAMix8bit": {},
    "LAMB8bit": {},
    "LARS8bit": {"lr": 0.1, "momentum": 0.9},
    "PagedAdam8bit": {},
    "PagedAdamW8bit": {},
    "PagedLion8bit": {},
    "PagedAdEMAMix8bit": {},
}
STATES_BYTES = {
    "Lion8bit": 1,
    "PagedLion8bit": 1,
    "SGD8bit": 1,
    "RMSprop8bit": 1,
    "Adagrad8bit": 1,
    "LARS8bit": 1,
}
STATES_BYTES |= {"AdEMAMix8bit": 3, "PagedAdEMAMix8bit": 3}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(128, 64)
        self.mix = nn.Linear(64, 128)
        self.back = nn.Linear(128, 64)
        self.head = nn.Linear(64, 128, bias=False)
        self.head.weight = self.wte.weight
        self.pos_emb = Parameter(torch.randn(100, 64))


def build(name: str = "AdamW8bit", dtype: torch.dtype = BF16, seed: int = 0, adapt: bool = True, **options):
    """A model in one dtype and one of bitsandbytes' optimizers over it, paging warnings apart."""
    torch.manual_seed(seed)
    model = Model().to(dtype)
    optimizer = getattr(bnb.optim, name)(model.parameters(), **NAMES.get(name, {}), **options)
    if adapt:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NoEffectWarning)
            adapt_bitsandbytes(optimizer, model)
    return model, optimizer


def run(model: nn.Module, optimizer, steps) -> None:
    for step in steps:
        set_gradients(model.parameters(), seed=step)
        optimizer.step()


def bits(optimizer, parameter: Parameter) -> int:
    return 8 if optimizer.state[parameter]["state1"].dtype == torch.uint8 else 32


@pytest.fixture
def manager():
    """bitsandbytes' global manager, empty before and after."""
    found = GlobalOptimManager.get_instance()
    found.initialize()
    yield found
    found.initialize()


@pytest.mark.parametrize("states", [None, "compact", "exact"])
@pytest.mark.parametrize("name", NAMES)
def test_embeddings_keep_32_bits_and_the_rest_has_8(name, states):
    model, optimizer = build(name)
    if states is not None:
        compensate(optimizer, mode="split", states=states, bucket_bytes=1)  # one parameter a bucket
    run(model, optimizer, range(2))
    assert bits(optimizer, model.wte.weight) == bits(optimizer, model.pos_emb) == 32
    assert optimizer.state[model.wte.weight]["state1"].dtype == FP32
    assert bits(optimizer, model.mix.weight) == bits(optimizer, model.back.weight) == 8
    assert set(adapter_of(optimizer).kept) == {"wte.weight", "pos_emb"}


def test_without_memkit_the_embedding_has_8_bits():
    model, optimizer = build(adapt=False)
    run(model, optimizer, range(1))
    assert bits(optimizer, model.wte.weight) == 8


def test_float32_exceptions_beside_bfloat16_weights_keep_32_bits():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).to(BF16)
    model[1].to(FP32)
    optimizer = bnb.optim.AdamW8bit(model.parameters())
    assert set(adapt_bitsandbytes(optimizer, model).kept) == {"1.weight"}
    plain = nn.Linear(64, 64)
    assert adapt_bitsandbytes(bnb.optim.AdamW8bit(plain.parameters()), plain).kept == {}


def test_it_can_be_switched_off_and_a_group_decides_otherwise():
    model = Model().to(BF16)
    optimizer = bnb.optim.AdamW8bit(model.parameters())
    adapter = adapt_bitsandbytes(optimizer, model, keep_at_risk=False)
    run(model, optimizer, range(1))
    assert adapter.kept == {}
    assert bits(optimizer, model.wte.weight) == 8
    model = Model().to(BF16)
    groups = [
        {"params": [model.wte.weight], "optim_bits": 8},
        {"params": [model.mix.weight], "optim_bits": 32},
        {"params": [model.pos_emb, model.back.weight]},
    ]
    optimizer = bnb.optim.AdamW8bit(groups)
    adapter = adapt_bitsandbytes(optimizer, model)
    compensate(optimizer)
    run(model, optimizer, range(1))
    assert set(adapter.kept) == {"pos_emb", "group 1, parameter 0"}
    assert bits(optimizer, model.wte.weight) == bits(optimizer, model.back.weight) == 8
    assert bits(optimizer, model.mix.weight) == bits(optimizer, model.pos_emb) == 32


def test_bits_of_a_group_are_checked():
    model = Model()
    optimizer = bnb.optim.AdamW8bit([{"params": list(model.parameters()), "optim_bits": 4}])
    with pytest.raises(ValueError, match="optim_bits=4 of a parameter group is neither 8 nor 32"):
        adapt_bitsandbytes(optimizer, model)


def test_parameters_that_come_later_are_kept_too():
    model = Model().to(BF16)
    optimizer = bnb.optim.AdamW8bit(model.mix.parameters())
    adapter = adapt_bitsandbytes(optimizer, model)
    compensate(optimizer)
    run(model, optimizer, range(1))
    assert adapter.kept == {}
    optimizer.add_param_group({"params": [model.back.weight, model.wte.weight]})
    run(model, optimizer, range(1))
    assert set(adapter.kept) == {"wte.weight"}
    assert bits(optimizer, model.wte.weight) == 32
    assert bits(optimizer, model.back.weight) == 8


def test_the_same_numbers_as_bitsandbytes_with_its_own_override(manager):
    model, optimizer = build(dtype=FP32)
    torch.manual_seed(0)
    other = Model()
    manager.register_parameters(other.parameters())
    stock = bnb.optim.AdamW8bit(other.parameters())
    for parameter in (other.wte.weight, other.pos_emb):
        manager.override_config(parameter, "optim_bits", 32)
    for step in range(3):
        run(model, optimizer, [step])
        run(other, stock, [step])
    assert_same_bits(all_tensors(optimizer), all_tensors(stock))


def test_nothing_leaks_through_the_global_manager(manager):
    model, optimizer = build()
    run(model, optimizer, range(1))
    assert not manager.pid2config
    assert not manager.index2config
    assert not manager.uses_config_override
    assert not manager.module_weight_config_triple
    other, stock = build(adapt=False)
    run(other, stock, range(1))
    assert bits(stock, other.wte.weight) == 8


@pytest.mark.parametrize("how", ["parameter", "module"])
def test_overrides_of_bitsandbytes_hold_for_compensated_steps(manager, how):
    """Without the adapter a shadow's id is in no override."""
    found = {}
    for adapt in (False, True):
        manager.initialize()
        model, optimizer = build(adapt=adapt)
        if how == "parameter":
            manager.override_config(model.mix.weight, key_value_dict={"optim_bits": 32, "lr": 0.0})
            manager.override_config(model.wte.weight, "optim_bits", 8)
        else:
            manager.register_module_override(model.mix, "weight", {"optim_bits": 32, "lr": 0.0})
            manager.register_module_override(model.wte, "weight", {"optim_bits": 8})
        compensate(optimizer, mode="split")
        if not adapt:
            adapter_of(optimizer).undo()
        before = model.mix.weight.detach().clone()
        run(model, optimizer, range(2))
        unmoved = torch.equal(before, model.mix.weight)
        found[adapt] = bits(optimizer, model.mix.weight), bits(optimizer, model.wte.weight), unmoved
    assert found == {False: (8, 8, False), True: (32, 8, True)}


def test_undo_gives_the_optimizer_back():
    model, optimizer = build(adapt=False)
    before = dict(vars(optimizer))
    adapter = adapt_bitsandbytes(optimizer, model)
    assert adapt_bitsandbytes(optimizer, model) is adapter_of(optimizer) is adapter
    adapter.undo()
    adapter.undo()
    assert vars(optimizer) == before
    assert adapter_of(optimizer) is None
    run(model, optimizer, range(1))
    assert bits(optimizer, model.wte.weight) == 8


def test_an_adapted_optimizer_is_freed_without_the_garbage_collector():
    model, optimizer = build()
    compensate(optimizer)
    run(model, optimizer, range(1))
    gone = weakref.ref(optimizer)
    gc.disable()
    try:
        del optimizer
        assert gone() is None
    finally:
        gc.enable()


def test_other_optimizers_and_sharded_parameters_are_refused():
    model = Model()
    assert not is_bitsandbytes(torch.optim.AdamW(model.parameters()))
    with pytest.raises(TypeError, match="AdamW is none of bitsandbytes' optimizers"):
        adapt_bitsandbytes(torch.optim.AdamW(model.parameters()))
    optimizer = bnb.optim.AdamW8bit(model.parameters())
    model.mix.weight.to_local = lambda: None  # what tells a DTensor
    with pytest.raises(ValueError, match="AdamW8bit steps whole tensors, and these parameters are sharded"):
        adapt_bitsandbytes(optimizer, model)


@pytest.mark.parametrize("name", ["PagedAdamW8bit", "PagedAdEMAMix8bit", "PagedAdamW32bit", "PagedLion"])
def test_paging_falls_back_off_cuda(name):
    model = nn.Linear(400, 300).to(BF16)  # above the 100,000 values from which bitsandbytes pages
    optimizer = getattr(bnb.optim, name)(model.parameters())
    with pytest.warns(NoEffectWarning, match=f"{name} moves its states.* on cpu, so nothing is paged"):
        adapter = adapt_bitsandbytes(optimizer, model)
    compensate(optimizer)
    run(model, optimizer, range(2))
    adapter.undo()
    assert optimizer.is_paged


def test_paging_falls_back_at_the_first_step_where_cuda_is_there_and_unused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    model = nn.Linear(64, 64)
    optimizer = bnb.optim.PagedAdamW8bit(model.parameters())
    adapt_bitsandbytes(optimizer, model)  # parameters may still move
    assert optimizer.is_paged
    with pytest.warns(NoEffectWarning, match="nothing is paged"):
        run(model, optimizer, range(1))
    run(model, optimizer, range(1))


def test_loaded_states_are_paged_again(monkeypatch):
    """On a stand-in for managed memory: what a GPU would do is bitsandbytes' own."""

    def get_paged(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        paged = torch.empty(shape, dtype=dtype)
        paged.is_paged = True
        return paged

    monkeypatch.setattr(functional, "get_paged", get_paged)
    monkeypatch.setattr(eight_bit, "PAGING_DEVICES", ("cpu",))
    model = nn.Sequential(nn.Linear(400, 300), nn.Linear(64, 64)).to(BF16)
    stock = bnb.optim.AdamW8bit(model.parameters())
    run(model, stock, range(1))
    saved = copy.deepcopy(stock.state_dict())
    paged = bnb.optim.PagedAdamW8bit(model.parameters())
    adapt_bitsandbytes(paged, model)
    compensate(paged)
    paged.load_state_dict(saved)
    eight_bit._before_step(paged, (), {})
    for name in ("state1", "state2"):
        assert paged.state[model[0].weight][name].is_paged
        assert torch.equal(paged.state[model[0].weight][name], stock.state[model[0].weight][name])
        assert not hasattr(paged.state[model[1].weight][name], "is_paged")
    pages = paged.page_mng.paged_tensors
    assert [id(page) for page in pages[-2:]] == [
        id(paged.state[model[0].weight][f"state{n}"]) for n in (1, 2)
    ]
    del pages[-2:]


def through_a_file(state: dict) -> dict:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


COMPENSATIONS = [None, *product(("kahan", "split", "split24", "stochastic", "none"), ("compact", "exact"))]


@pytest.mark.parametrize("compensation", COMPENSATIONS, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_resume_is_bitwise(name, compensation):
    model, optimizer = build(name)
    if compensation is not None:
        compensate(optimizer, mode=compensation[0], states=compensation[1], seed=3)
    run(model, optimizer, range(2))
    saved = through_a_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    other, resumed = build(name, seed=1)
    if compensation is not None:
        compensate(resumed, mode=compensation[0], states=compensation[1], seed=4)
    other.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    assert_same_bits(all_tensors(optimizer), all_tensors(resumed))
    run(model, optimizer, range(2, 4))
    run(other, resumed, range(2, 4))
    assert_same_bits(all_tensors(optimizer), all_tensors(resumed))


@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize("name", ["AdamW8bit", "Lion8bit", "AdEMAMix8bit"])
def test_a_step_can_be_rolled_back(name, steps_before):
    """As MemoryBudget does after running out of memory."""
    model, optimizer = build(name)
    handle = compensate(optimizer, mode="split")
    run(model, optimizer, range(steps_before))
    before, snapshot = all_tensors(optimizer), handle.snapshot()
    run(model, optimizer, [7, 8])
    after = all_tensors(optimizer)
    handle.restore(snapshot)
    assert_same_bits(all_tensors(optimizer), before)
    run(model, optimizer, [7, 8])
    assert_same_bits(all_tensors(optimizer), after)


def test_bitsandbytes_own_loading_destroys_low_halves():
    """The control of the test above."""
    model, optimizer = build(adapt=False)
    compensate(optimizer, mode="split")  # adapts, so that a resume is exact without a module, too
    run(model, optimizer, range(1))
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.state[model.mix.weight]["low_half"].dtype == torch.int16
    adapter_of(optimizer).undo()
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.state[model.mix.weight]["low_half"].dtype == BF16


@pytest.mark.parametrize("compensated", [False, True])
def test_hooks_of_loading_are_called_once(compensated):
    """bitsandbytes' own `load_state_dict` calls none."""
    model, optimizer = build()
    if compensated:
        compensate(optimizer)
    run(model, optimizer, range(1))
    called: list[str] = []

    def before(_, state_dict: dict) -> dict:
        called.append("before")
        groups = [{**group, "lr": 0.5} for group in state_dict["param_groups"]]
        return {**state_dict, "param_groups": groups}

    optimizer.register_load_state_dict_pre_hook(before)
    optimizer.register_load_state_dict_post_hook(lambda _: called.append("after"))
    optimizer.load_state_dict(optimizer.state_dict())
    assert called == ["before", "after"]
    assert optimizer.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize("name", ["AdamW8bit", "AdEMAMix8bit"])
@pytest.mark.parametrize("mode", [None, "split"])
def test_8bit_states_of_embeddings_in_a_checkpoint_are_widened(name, mode):
    model, stock = build(name, adapt=False)
    run(model, stock, range(3))
    eight = stock.state[model.pos_emb]
    if name == "AdamW8bit":
        truth = functional.dequantize_blockwise(
            eight["state2"], absmax=eight["absmax2"], code=eight["qmap2"], blocksize=256
        )
    saved = through_a_file(stock.state_dict())
    resumed = getattr(bnb.optim, name)(model.parameters())
    if mode is not None:
        compensate(resumed, mode=mode)
    adapt_bitsandbytes(resumed, model)
    resumed.load_state_dict(saved)
    state = resumed.state[model.pos_emb]
    kept = {key for key in state if not key.startswith("low")}
    assert kept == {"step", "state1", "state2", "keep_float32"}
    assert state["state1"].dtype == state["state2"].dtype == FP32
    if name == "AdamW8bit":
        assert torch.equal(state["state2"], truth)
    assert bits(resumed, model.mix.weight) == 8
    run(model, resumed, range(3, 5))


def test_dequantized_means_of_ademamix_have_scales_of_their_own():
    values = torch.stack([torch.randn(65, 70), 100 * torch.randn(65, 70)])
    parts = [functional.quantize_blockwise(part, blocksize=256) for part in values]
    state = {
        "state1": torch.stack([codes for codes, _ in parts]),
        "absmax1": torch.stack([made.absmax for _, made in parts]),
        "qmap1": parts[0][1].code,
    }
    dequantize_(state)
    assert set(state) == {"state1"}
    truth = torch.stack([functional.dequantize_blockwise(codes, made) for codes, made in parts])
    assert torch.equal(state["state1"], truth)


@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith("Paged")])
def test_bytes_a_parameter_with_compensation(name):
    """2 for the weight, 2 for the gradient, 1 a state, 2 for the low half, and a scale for every 256 values."""
    model, optimizer = build(name)
    handle = compensate(optimizer, mode="split", states="exact")
    run(model, optimizer, range(1))
    measured = handle.bytes_per_parameter()
    count = STATES_BYTES.get(name, 2)
    assert measured.quantized is not None
    assert measured.exceptions is not None
    assert measured.quantized.parameters == 2 * 64 * 128
    tables = 1024 * min(count, 2) / measured.quantized.parameters
    norms = 4 * 2 / measured.quantized.parameters if name in ("LAMB8bit", "LARS8bit") else 0
    assert measured.quantized.total == pytest.approx(6 + count * (1 + 4 / 256) + tables + norms)
    exceptions = 128 * 64 + 100 * 64 + 128 + 64
    assert measured.exceptions_share == exceptions / (exceptions + 2 * 64 * 128)
    assert measured.exceptions.total == pytest.approx(6 + 4 * count, abs=0.01)
    weighed = measured.exceptions_share * measured.exceptions.total
    weighed += (1 - measured.exceptions_share) * measured.quantized.total
    assert measured.total == pytest.approx(weighed)
    assert f"{measured.exceptions.total:.2f} for the other {measured.exceptions_share:.1%}" in str(measured)


def test_bytes_of_other_optimizers_have_no_share():
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    run(model, optimizer, range(1))
    measured = bytes_per_parameter(optimizer)
    assert measured.quantized is None
    assert measured.exceptions is None
    assert measured.exceptions_share == 0
    assert measured.states == pytest.approx(8, abs=0.01)


def test_bytes_of_quantized_tensors_are_those_of_their_parts():
    from torchao.optim import AdamW8bit

    model = nn.Linear(64, 64, bias=False)
    optimizer = AdamW8bit(model.parameters())
    with torch.compiler.set_stance("force_eager"):
        run(model, optimizer, range(1))
    measured = bytes_per_parameter(optimizer)
    assert measured.quantized is not None
    assert measured.exceptions is None
    assert measured.states == pytest.approx(2 * (1 + 4 / 256 + 1024 / 4096), abs=0.01)


@NEEDS_COMPILER
@pytest.mark.parametrize("name", ["PagedAdamW8bit", "PagedLion8bit", "PagedAdamW"])
@pytest.mark.parametrize("by", ["trial", "snapshot", "retry", "retry of the whole step", "half a state"])
def test_pages_of_removed_states_are_used_again(monkeypatch, name, by):
    """bitsandbytes frees no managed memory: a trial before step 1 kept a second set of states."""
    made = []

    def get_paged(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        paged = torch.empty(shape, dtype=dtype)
        paged.is_paged, paged.page_deviceid = True, device.index
        made.append(paged)
        return paged

    monkeypatch.setattr(functional, "get_paged", get_paged)
    monkeypatch.setattr(functional, "fill", lambda page, value: page.fill_(value))
    with fake_device() as device:
        weights = [
            Parameter(torch.ones(rows, 1024, device=device.torch_device)) for rows in (128, 128, 256, 8)
        ]
        optimizer = getattr(bnb.optim, name)(weights)
        monkeypatch.setattr(optimizer.page_mng, "paged_tensors", [])

        def make_states() -> None:
            optimizer.check_overrides()
            for place, weight in enumerate(weights):
                optimizer.init_state(optimizer.param_groups[0], weight, 0, place)

        removals = {
            "trial": partial(forget_new_states, optimizer, known_states(optimizer)),
            "snapshot": partial(restore_snapshot, optimizer, take_snapshot(optimizer, weights=False)),
            "retry": StepCopies(optimizer, slots(optimizer), on_host=True).restore,
            "retry of the whole step": WholeStepCopies(optimizer).restore,
        }
        if by == "half a state":  # as a compensated step has, whose low halves are there before
            for weight in weights:
                optimizer.state[weight] = {"low": torch.zeros(1)}
            removals[by] = StepCopies(optimizer, slots(optimizer), on_host=True).restore
        make_states()
        first = len(made)
        for page in made:
            page.fill_(7)
        for _ in range(2):
            removals[by]()
            assert not any(name.startswith("state") for state in optimizer.state.values() for name in state)
            make_states()
        assert len(made) == first == len(optimizer.page_mng.paged_tensors) > 0
        states = [value for state in optimizer.state.values() for value in state.values()]
        in_use = [value for value in states if getattr(value, "is_paged", False)]
        assert {id(page) for page in in_use} == {id(page) for page in made}
        assert all(not page.any() for page in in_use)
