# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportOptionalMemberAccess=false
# pyright: reportIndexIssue=false, reportCallIssue=false
"""Which saved tensors move: activations, and nothing that is made of parameters; the host stands for the device."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_memkit.activations.offload import offload_activations
from tests.activations.models import Stack
from tests.activations.offload_models import Deep, assert_same, gradients, host_as_device, ids


@pytest.fixture(autouse=True)
def moving():
    with host_as_device():
        yield


def offloaded(model, **options):
    return offload_activations(model, min_bytes=1, pin_memory=False, **options)


def moved(model, x):
    """Bytes that one step moves; its gradients are checked on the way."""
    plain = gradients(model, x)
    with offloaded(model) as offload:
        assert_same(gradients(model, x), plain)
        return offload.counts.moved_bytes


class Layer(nn.Module):
    """Saves its input, and what `weigh` makes of its weight."""

    def __init__(self, weigh, frozen=False):
        super().__init__()
        self.weight, self.weigh = nn.Parameter(torch.randn(24, 24)), weigh
        self.weight.requires_grad_(not frozen)

    def forward(self, x):
        return x @ self.weigh(self.weight)


class Layers(nn.Module):
    def __init__(self, weigh, frozen=False):
        super().__init__()
        self.first = nn.Parameter(torch.randn(24))
        self.blocks = nn.ModuleList(Wrapped(Layer(weigh, frozen)) for _ in range(2))

    def forward(self, x):
        x = x * self.first
        for block in self.blocks:
            x = block(x)
        return x


class Wrapped(nn.Module):
    """A block needs a child: lone layers are none."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x)


WAYS = {
    "itself": lambda w: w,
    "a transpose": lambda w: w.t(),
    "a part": lambda w: w[:, :24].view(24, 24),
    "a cast": lambda w: w.to(torch.bfloat16).t(),
    "a cast and back": lambda w: w.to(torch.float64).to(torch.bfloat16),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("frozen", [False, True])
def test_parameters_and_what_is_made_of_them_stay(way, frozen):
    torch.manual_seed(0)
    model = Layers(WAYS[way], frozen)
    x = torch.randn(7, 24)
    if "cast" in way:
        model.first.data, x = model.first.data.bfloat16(), x.bfloat16()
    if frozen:  # a product with a frozen weight keeps the weight only
        assert moved(model, x) == 0
    else:
        assert moved(model, x) == 2 * x.nbytes


def test_the_control_moves_a_weight_that_is_computed():
    torch.manual_seed(0)
    x = torch.randn(7, 24)
    assert moved(Layers(lambda w: w * 2), x) == 2 * (x.nbytes + 24 * 24 * 4)


def test_under_autocast_the_weights_casts_stay():
    model, batch = Deep(dropout=0.0), ids(5, 7)  # no activation has as many elements as a parameter

    def step():
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(batch).float().square().mean()
        loss.backward()
        return [loss.detach(), *(p.grad for p in model.parameters())]

    plain = step()
    sizes = {p.numel() for p in model.parameters()}
    packed = []
    with offloaded(model) as offload:
        traffic = offload._traffic
        parcel = traffic._parcel

        def watched(tensor, *args):
            found = parcel(tensor, *args)
            packed.append((tensor.numel(), found is not None))
            return found

        traffic._parcel = watched
        assert_same(step(), plain)
    assert any(moved for _, moved in packed)
    assert {numel for numel, moved in packed if moved}.isdisjoint(sizes)
    assert {numel for numel, moved in packed if not moved} & sizes


def test_buffers_stay():
    class Buffered(Wrapped):
        def __init__(self):
            super().__init__(nn.Linear(8, 8, bias=False))
            self.register_buffer("table", torch.randn(7, 8))

        def forward(self, x):
            return self.layer(x) * self.table

    x = torch.randn(7, 8)
    # The input, and nothing of the product: its other factor needs the table only.
    assert moved(nn.Sequential(Buffered(), Buffered()), x) == 2 * x.nbytes


def test_a_small_view_of_a_large_storage_stays():
    class Windows(Wrapped):
        def forward(self, x):
            return self.layer(x) + self.table[:1] * x

    model = nn.Sequential(*(Windows(nn.Linear(8, 8)) for _ in range(2)))
    table = torch.randn(1000, 8)
    for block in model:
        block.table = table
    x = torch.randn(7, 8)
    assert moved(model, x) < table.nbytes


@pytest.mark.parametrize("late", [False, True])
def test_what_was_changed_in_place_is_refused_as_autograd_does(late):
    class Careless(Wrapped):
        def forward(self, x):
            y = self.layer(x).exp()  # saves its output
            self.kept = y
            if not late:
                y.mul_(2)
            return y.clone()

    model = nn.Sequential(*(Careless(nn.Linear(8, 8)) for _ in range(3)))

    def step(moves):
        loss = model(torch.ones(2, 8)).sum()
        if late:
            model[2].kept.detach().mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

    step(moves=False)
    for least in (1, 10**9):  # moved, or too small to be
        with offload_activations(model, min_bytes=least, pin_memory=False):
            step(moves=True)


def test_a_storage_that_is_saved_again_after_a_change_is_copied_again():
    class Scaled(Wrapped):
        def forward(self, x, state):
            return self.layer(x) * state  # saves the state

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Scaled(nn.Linear(8, 8)) for _ in range(2))

        def forward(self, x):
            state = torch.ones(2, 8)
            self.unused = self.blocks[0](x, state)  # its graph is kept, and never run backwards
            state.mul_(2)
            return self.blocks[1](x, state)

    torch.manual_seed(0)
    assert moved(Model(), torch.randn(2, 8)) == 3 * 2 * 8 * 4  # x, and the state twice


def test_in_place_operators_of_a_correct_model():
    torch.manual_seed(0)
    model = nn.Sequential(
        *(
            nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(inplace=True))
            for _ in "abc"
        )
    )
    assert moved(model, torch.randn(2, 3, 8, 8)) > 0


def test_keyword_arguments_and_dropout():
    model = Stack().train()
    assert moved(model, ids()) > 0


def test_transformers_blocks_and_attention():
    from tests.activations.models import transformers_model

    model = transformers_model("LlamaForCausalLM").train()
    batch = ids(2, 16)

    def step():
        model.zero_grad()
        torch.manual_seed(0)
        model(batch, labels=batch).loss.backward()
        return [p.grad.clone() for p in model.parameters()]

    plain = step()
    with offloaded(model) as offload:
        assert_same(step(), plain)
        assert offload.counts.visits == 2
        assert offload.counts.moved_bytes > 0


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)  # torch's own tracing
def test_compiled_blocks_are_offloaded_and_a_compiled_model_runs_as_before():
    torch._dynamo.reset()  # other tests' graphs count towards the limit beyond which a call runs uncompiled
    torch.manual_seed(0)
    x = torch.randn(4, 8)

    def build():
        torch.manual_seed(0)
        return nn.Sequential(
            *(Wrapped(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))) for _ in "ab")
        )

    in_place, around, whole = build(), build(), build()
    for block in in_place:
        block.compile(backend="aot_eager")
    around = nn.Sequential(*(torch.compile(block, backend="aot_eager") for block in around))
    for model in (in_place, around):
        assert moved(model, x) > 0
    compiled = torch.compile(whole, backend="aot_eager")
    plain = gradients(compiled, x)
    with offloaded(whole) as offload:
        assert_same(gradients(compiled, x), plain)
        assert offload.counts.visits == 0
    torch._dynamo.reset()


def test_frozen_blocks():
    model = Deep()
    for block in model.blocks[:3]:
        block.requires_grad_(False)
    model.embedding.requires_grad_(False)
    plain = gradients(copy.deepcopy(model), ids())
    with offloaded(model):
        assert_same(gradients(model, ids()), plain)


def test_a_functional_loss_in_a_block_keeps_integers_bitwise():
    class Picks(Wrapped):
        def forward(self, x):
            labels = torch.arange(x.shape[0]) % 8
            return x + F.cross_entropy(self.layer(x), labels) + F.embedding(labels, self.layer.weight)

    assert moved(nn.Sequential(*(Picks(nn.Linear(8, 8)) for _ in range(2))), torch.randn(6, 8)) > 0


def test_beside_a_models_own_checkpointing_the_layers_inputs_move():
    from tests.activations.models import checkpointed_by_itself, transformers_model

    model = transformers_model("LlamaForCausalLM").train()
    checkpointed_by_itself(model)
    batch = ids(2, 16)

    def step():
        model.zero_grad()
        torch.manual_seed(0)
        model(batch, labels=batch, use_cache=False).loss.backward()
        return [p.grad.clone() for p in model.parameters()]

    plain = step()
    with offloaded(model) as offload:
        assert_same(step(), plain)
        # The layers' inputs; beside them what all layers get alike (rotary tables, positions), once.
        assert 2 * batch.numel() * 32 * 4 <= offload.counts.moved_bytes < 3 * batch.numel() * 32 * 4
