# pyright: reportIndexIssue=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportArgumentType=false
import copy
import gc
import inspect
import pickle
import random
import weakref

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.flop_counter import FlopCounterMode

from lightning_memkit import NoEffectWarning, checkpoint_modules
from lightning_memkit.activations import planned, profiling
from lightning_memkit.activations.choosing import choose
from lightning_memkit.memory.meter import ByteMeter
from tests.activations.models import (
    CAUSAL,
    VOCABULARY,
    Block,
    ConvNet,
    Stack,
    checkpointed_by_itself,
    transformers_model,
)


def ids(rows=2, length=16):
    return torch.randint(VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(1))


def images():
    return torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def run(model, batch, backwards=1):
    """Loss, gradients and buffers of one step with a fixed seed, and the RNG state after it."""
    model.zero_grad()
    torch.manual_seed(3)
    out = model(batch)
    loss = getattr(out, "logits", out).float().square().mean()
    for index in range(backwards):
        loss.backward(retain_graph=index + 1 < backwards)
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    return {"loss": loss.detach(), **gradients, **buffers, "rng": torch.get_rng_state()}


def assert_same(ours, plain):
    assert ours.keys() == plain.keys()
    for name, value in plain.items():
        assert torch.equal(ours[name], value), name


def saved_bytes(model, batch):
    """Bytes that autograd keeps for backward, counted by storage, parameters and inputs left out."""
    known = {p.untyped_storage()._cdata for p in (*model.parameters(), *model.buffers(), batch)}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in known:
            kept[storage._cdata] = (weakref.ref(storage), storage.nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = model(batch)
    total = sum(size for alive, size in kept.values() if alive() is not None)
    del out
    return total


EAGER = [
    "full", "every:2", "selective", "selective:attention", "selective:native_batch_norm,tanh/2",
    "budget:0.6", "budget:0.01", "auto:1MiB",
]  # fmt: skip


@pytest.mark.parametrize("policy", EAGER)
@pytest.mark.filterwarnings("ignore:The budget of .* can't be met")
@pytest.mark.filterwarnings("ignore:No operator of the blocks matches")
@pytest.mark.parametrize(("build", "batch"), [(Stack, ids), (ConvNet, images)], ids=["dropout", "batchnorm"])
def test_loss_gradients_and_buffers_are_bitwise_those_of_the_plain_model(build, batch, policy):
    model = build().train()
    ours = copy.deepcopy(model)
    checkpoint_modules(ours, policy)
    for _ in range(3):  # budgets measure, then plan; statistics of one step enter the next
        assert_same(run(ours, batch()), run(model, batch()))


@pytest.mark.parametrize("policy", ["full", "budget:0.5"])
@pytest.mark.parametrize("name", CAUSAL)
def test_transformers_models_are_bitwise_the_same_and_keep_less(name, policy):
    model = transformers_model(name).train()
    ours = copy.deepcopy(model)
    checkpoint_modules(ours, policy)
    for _ in range(1 if policy == "full" else 2):
        assert_same(run(ours, ids()), run(model, ids()))
    assert alive_bytes(ours, ids()) < 0.7 * alive_bytes(model, ids())


def alive_bytes(model, batch):
    """Bytes of what a forward has made and is alive at its end, the output left out; nothing is asked of autograd."""
    with ByteMeter() as meter:
        out = model(batch)
        out = getattr(out, "logits", out)
        return meter.live_bytes - out.nbytes


@pytest.mark.parametrize("fraction", [0.8, 0.6, 0.4, 0.25])
def test_a_budget_is_met_from_below(fraction, monkeypatch):
    # What an operator takes by the clock decides what is kept, and on a busy machine anything may.
    def seconds(run):
        return 1e-6 + 1e-9 * sum(storage.nbytes() for storage in run())

    monkeypatch.setattr(profiling, "_seconds", seconds)
    model = transformers_model("LlamaForCausalLM").train()
    batch = ids(4, 64)

    def loss_bytes():
        with ByteMeter() as meter:
            loss = model(input_ids=batch, labels=batch).loss
            found = meter.live_bytes
        loss.backward()
        return found

    loss_bytes()  # whatever the model makes once
    plain = loss_bytes()
    checkpoint_modules(model, f"budget:{fraction}")
    first = loss_bytes()
    assert first < 0.5 * plain  # it measures one block at a time
    assert 0.9 * fraction * plain < loss_bytes() <= 1.005 * fraction * plain


def test_a_larger_budget_recomputes_less_and_bytes_do_as_well_as_fractions():
    def flops(policy):
        model = Stack(width=64, depth=4, dropout=0.0)
        batch = ids(4, 32)
        checkpoint_modules(model, policy)
        for _ in range(2):
            model(batch).sum().backward()
        with FlopCounterMode(display=False) as counter:
            model(batch).sum().backward()
        return counter.get_total_flops()

    found = [flops(policy) for policy in ("budget:0.3", "budget:50%", "budget:0.7", "budget:1")]
    assert found == sorted(found, reverse=True)
    assert found[0] > found[-1]
    assert flops("budget:1GiB") == found[-1]
    assert flops("auto:1GiB") == found[-1]


def test_a_budget_below_the_least_is_said_and_the_least_is_kept():
    model = Stack(depth=4)
    checkpoint_modules(model, "budget:0.01")
    model(ids()).sum().backward()
    with pytest.warns(UserWarning, match=r"can't be met: .* a loss without logits, saves more"):
        model(ids()).sum().backward()


def test_a_forward_without_a_backward_leaves_nothing_in_memory():
    """The first one, which counts what is saved outside of the blocks: tanh saves its own result."""
    kept = []

    class Squashed(Stack):
        def forward(self, batch):
            result = super().forward(batch).tanh()
            kept.append(StorageWeakRef(result.untyped_storage()))
            return result

    model = Squashed().train()
    checkpoint_modules(model, "budget:0.5")
    model(ids())
    gc.collect()
    assert [one.expired() for one in kept] == [True]


def test_a_budget_in_bytes_holds_for_larger_batches():
    model = Stack(width=64, depth=4)
    plain = alive_bytes(model, ids(2, 32))
    checkpoint_modules(model, f"budget:{plain}B")
    for _ in range(2):
        model(ids(2, 32)).sum().backward()
    assert alive_bytes(model, ids(2, 32)) <= plain
    assert alive_bytes(model, ids(4, 32)) <= plain


def test_batches_of_many_lengths_share_few_choices(monkeypatch):
    asked = []
    monkeypatch.setattr(planned, "choose", lambda *given: asked.append(given) or choose(*given))
    model = Stack(width=64, depth=2)
    plain = alive_bytes(model, ids(2, 32))
    checkpoint_modules(model, f"budget:{plain}B")
    for length in (32, *range(8, 64)):
        model(ids(2, length)).sum().backward()
    assert alive_bytes(model, ids(2, 63)) <= plain
    assert len(asked) <= 3 * 16 + 1  # three doublings from 8 to 64


def test_selective_saves_what_it_names():
    model = Stack(width=64, depth=2, dropout=0.0)
    batch = ids(4, 32)

    def flops(policy):
        undo = checkpoint_modules(model, policy)
        with FlopCounterMode(display=False) as counter:
            model(batch).sum().backward()
        undo()
        return counter.get_total_flops()

    with FlopCounterMode(display=False) as counter:
        model(batch).sum().backward()
    none = counter.get_total_flops()
    matmul = 2 * 4 * 32 * 64 * 256
    assert flops("selective:matmul") == none
    assert flops("selective:gelu") == none + 2 * matmul  # gelu's input is saved by autograd and not kept
    assert flops("selective:matmul/2") == none  # every second: the first of a block is the one that is needed
    assert flops("full") == none + 4 * matmul  # the whole block, also what nothing is saved of


def test_an_operator_that_is_named_and_never_runs_is_said_once():
    model = Stack(depth=2)
    checkpoint_modules(model, "selective:gelu,matmull")
    model(ids()).sum().backward()
    with pytest.warns(NoEffectWarning, match="matches 'matmull' .* operators that ran: .*gelu"):
        model(ids()).sum().backward()
    model(ids()).sum().backward()


def test_blocks_without_attention_are_no_fault_of_the_usual_policy():
    model = Stack(depth=2)
    checkpoint_modules(model, "selective")
    for _ in range(3):
        model(ids()).sum().backward()


def test_a_forward_that_takes_other_branches_stays_right():
    class Branching(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x):
            for _ in range(random.randint(1, 4)):
                x = torch.tanh(self.layer(x))
            return torch.sigmoid(x) if random.random() < 0.5 else x.exp()

    model = nn.Sequential(Branching(), Branching(), Branching()).train()
    ours = copy.deepcopy(model)
    checkpoint_modules(ours, "budget:0.5")
    for seed in range(8):
        x = torch.randn(4, 8)
        random.seed(seed)
        mine = run(ours, x)
        random.seed(seed)
        assert_same(mine, run(model, x))


def test_a_router_chooses_its_experts_once():
    class NoisyRouter(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

        def forward(self, x):
            return torch.tanh(self.experts[random.randrange(4)](x))

    model = nn.Sequential(*(nn.Sequential(NoisyRouter(), nn.Linear(8, 8)) for _ in range(2)))
    ours = copy.deepcopy(model)
    checkpoint_modules(ours, blocks=["NoisyRouter"])
    x = torch.randn(4, 8)
    random.seed(0)
    mine = run(ours, x)
    random.seed(0)
    assert_same(mine, run(model, x))


@pytest.mark.parametrize("policy", ["selective", "budget:0.5"])
def test_the_first_block_of_a_model_with_frozen_parts_needs_no_input_gradient(policy):
    model = Stack().train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("blocks.0.mix.0" in name or "blocks.3" in name)
    ours = copy.deepcopy(model)
    checkpoint_modules(ours, policy)
    for _ in range(3):
        assert_same(run(ours, ids()), run(model, ids()))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
@pytest.mark.slow
def test_compiled_blocks_compute_the_same_up_to_rounding_and_save_less():
    model = Stack(width=64, depth=4, dropout=0.0).train()
    ours = copy.deepcopy(model)
    undo = checkpoint_modules(ours, "compile:0")
    batch = ids(4, 32)
    for mine, plain in zip(run(ours, batch).values(), run(model, batch).values(), strict=True):
        torch.testing.assert_close(mine, plain)
    undo()
    assert_same(run(ours, batch), run(model, batch))


def test_saved_bytes_fall_to_the_blocks_inputs():
    model = Stack(depth=8)
    batch = ids(4, 64)
    plain = saved_bytes(model, batch)
    undo = checkpoint_modules(model, "every:2")
    half = saved_bytes(model, batch)
    undo()
    checkpoint_modules(model)
    full = saved_bytes(model, batch)
    assert full < 0.15 * plain
    assert 0.5 * plain < half < 0.65 * plain


def test_statistics_are_updated_once_even_with_two_backwards():
    model = ConvNet().train()
    ours = copy.deepcopy(model)
    checkpoint_modules(ours)
    assert_same(run(ours, images(), backwards=2), run(model, images(), backwards=2))
    assert ours.stages[0].blocks[0].body[1].num_batches_tracked == 1


def test_the_control_updates_statistics_twice():
    block = ConvNet().stages[0].blocks[0].train()
    x = torch.randn(2, 8, 4, 4, requires_grad=True)
    torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False).sum().backward()
    assert block.body[1].num_batches_tracked == 2


def test_buffers_that_no_class_announces_are_written_once():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = spectral_norm(nn.Linear(8, 8))
            self.register_buffer("level", torch.zeros(8))
            self.register_buffer("table", torch.ones(8))

        def forward(self, x):
            with torch.no_grad():
                self.level = 0.9 * self.level + x.mean(0)  # a new tensor each time
            return self.layer(x) * self.table + self.level

    model = nn.Sequential(Counting(), Counting()).train()
    ours = copy.deepcopy(model)
    checkpoint_modules(ours)
    x = torch.randn(4, 8)
    for _ in range(3):
        assert_same(run(ours, x), run(model, x))


def test_eval_and_no_grad_run_each_block_once_and_keep_as_much():
    model = Stack()
    calls = []
    for block in model.blocks:
        block.mix.register_forward_hook(lambda *_: calls.append(1))
    checkpoint_modules(model)
    model.eval()(ids()).sum().backward()
    with torch.no_grad():
        model.train()(ids())
    assert len(calls) == 8
    model.train()(ids()).sum().backward()
    assert len(calls) == 16


@pytest.mark.parametrize("policy", ["full", "selective", "budget:0.5", "compile:0.5"])
def test_undo_restores_the_instance_exactly(policy):
    model = Stack()
    before = [dict(module.__dict__) for module in model.modules()]
    undo = checkpoint_modules(model, policy)
    assert model.state_dict().keys() == Stack().state_dict().keys()
    assert "forward" in model.blocks[0].__dict__
    undo()
    assert [dict(module.__dict__) for module in model.modules()] == before
    undo()  # a second call changes nothing


def test_undo_under_a_foreign_patch_only_passes_through():
    model = Stack(depth=2)
    plain = saved_bytes(model, ids())
    undo = checkpoint_modules(model)
    ours = model.blocks[0].forward
    model.blocks[0].forward = lambda *args, **kwargs: ours(*args, **kwargs)
    undo()
    assert saved_bytes(model, ids()) == plain


def test_a_forward_on_the_instance_is_kept_and_put_back():
    model = Stack(depth=2)
    doubled = lambda x, scale: 2 * x  # noqa: E731
    model.blocks[0].forward = doubled
    undo = checkpoint_modules(model)
    x = torch.randn(1, 2, 32, requires_grad=True)
    assert torch.equal(model.blocks[0](x, scale=None), 2 * x)
    undo()
    assert model.blocks[0].forward is doubled


def test_copies_and_pickles_use_their_own_parameters():
    model = Stack()
    checkpoint_modules(model)
    unpickled = pickle.loads(pickle.dumps(model)).eval()
    assert torch.equal(unpickled(ids()), copy.deepcopy(model).eval()(ids()))
    twin = copy.deepcopy(model)
    nn.init.zeros_(twin.blocks[0].mix[0].weight)
    twin.blocks[0](torch.randn(2, 4, 32)).sum().backward()
    assert twin.blocks[0].mix[2].weight.grad is not None
    assert model.blocks[0].mix[2].weight.grad is None


def test_a_second_checkpointing_is_refused():
    model = Stack()
    undo = checkpoint_modules(model, "every:2")
    with pytest.raises(ValueError, match=r"blocks\.0 is checkpointed already; call the undo"):
        checkpoint_modules(model, blocks=["Sequential"])
    undo()
    checkpoint_modules(model)


def test_the_models_own_checkpointing_beside_ours_is_refused():
    model = transformers_model("LlamaForCausalLM")
    checkpointed_by_itself(model)
    with pytest.raises(ValueError, match="the model's own gradient checkpointing; use one of the two"):
        checkpoint_modules(model)


@pytest.mark.parametrize(
    "policy", ["none", "every", "every:x", "full:2", "", "selective:", "budget:", "compile:x"]
)
def test_an_unknown_policy_is_refused_with_the_list(policy):
    with pytest.raises(ValueError, match=r'the policies are "full", "every:k"'):
        checkpoint_modules(Stack(), policy)


@pytest.mark.parametrize("policy", ["every:0", "every:-1"])
def test_a_policy_out_of_range_is_refused(policy):
    with pytest.raises(ValueError, match="at least 1"):
        checkpoint_modules(Stack(), policy)


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("budget:0", r"budget:0.* outside \(0, 1\]"),
        ("budget:1.5", r"budget:1\.5.* outside \(0, 1\]"),
        ("budget:50", r"for 50 % write 0\.5"),
        ("budget:fast", "'fast' is not a size"),
        ("budget:150%", "'150%' is not a size"),
        ("compile:2", r"outside \[0, 1\]"),
        ("selective:mm/0", "at least 1"),
        ("selective:mm;add", "names no operator to save"),
        ("auto", "write a size, such as"),
        ("auto:much", "'much' is not a size"),
    ],
)
def test_what_is_wrong_with_a_policy_is_said(policy, message):
    with pytest.raises(ValueError, match=message):
        checkpoint_modules(Stack(), policy)


def test_nothing_matched_is_said_with_the_blocks_found():
    with pytest.warns(NoEffectWarning, match=r"4 Block \(blocks\.0, \.\.\.\)"):
        checkpoint_modules(Stack(), blocks=["Attention"])()
    with pytest.warns(NoEffectWarning, match=r"Modules there: 0 \(Linear\)"):
        checkpoint_modules(nn.Sequential(nn.Linear(2, 2)))()


def test_an_empty_cache_stays_empty_and_a_filled_one_switches_checkpointing_off():
    from transformers import DynamicCache

    model = transformers_model("LlamaForCausalLM").train()
    plain = copy.deepcopy(model)
    checkpoint_modules(model)
    with pytest.warns(UserWarning, match="KV cache stays empty"):
        out = model(ids(), use_cache=True)
    assert out.past_key_values.get_seq_length() == 0

    # The name of the argument since transformers 5.24.
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"

    def loss_with_prefix(network):
        torch.manual_seed(0)
        cache = DynamicCache(config=network.config)
        with torch.no_grad():
            network(ids(2, 4), **{name: cache}, use_cache=True)
        torch.manual_seed(0)
        return network(ids(), **{name: cache}, use_cache=True).logits.sum()

    with pytest.warns(NoEffectWarning, match="filled KV cache"):
        ours = loss_with_prefix(model)
    assert torch.equal(ours, loss_with_prefix(plain))
    ours.backward()


@pytest.mark.parametrize("autocast", [True, False])
def test_autocast_and_default_dtype_are_those_of_the_forward(autocast):
    class Making(Block):
        def forward(self, x, *, scale=None):
            return super().forward(x + torch.full((32,), 0.3).to(x), scale=scale) * torch.ones(32)

    def step(model):
        model.zero_grad()
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float32 if autocast else torch.bfloat16)
        try:
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                torch.manual_seed(0)
                loss = model(torch.ones(2, 32, dtype=torch.get_default_dtype())).sum()
        finally:
            torch.set_default_dtype(default)
        loss.backward()
        assert torch.get_default_dtype() == torch.float32
        return [parameter.grad for parameter in model.parameters()]

    model = nn.Sequential(Making(32, 0.1), Making(32, 0.1)).train()
    if not autocast:
        model.bfloat16()
    ours = copy.deepcopy(model)
    checkpoint_modules(ours)
    for mine, theirs in zip(step(ours), step(model), strict=True):
        assert torch.equal(mine, theirs)


def test_frozen_blocks_and_tied_weights_are_bitwise_the_same():
    model = Stack().train()
    model.head.weight = model.embedding.weight
    for parameter in model.blocks[0].parameters():
        parameter.requires_grad_(False)
    ours = copy.deepcopy(model)
    checkpoint_modules(ours)
    assert ours.head.weight is ours.embedding.weight
    assert_same(run(ours, ids()), run(model, ids()))
