import math

import pytest
import torch
import torchmetrics
from torch import nn

from lightning_memkit.initialization.casting import cast_inputs, cast_module
from lightning_memkit.optim.split import join
from lightning_memkit.utilities.errors import NoEffectWarning

BF16, FP32 = torch.bfloat16, torch.float32


def dtypes(module: nn.Module) -> dict[str, torch.dtype]:
    return {name: tensor.dtype for name, tensor in [*module.named_parameters(), *module.named_buffers()]}


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        frequencies = 1.0 / 10_000 ** (torch.arange(0, 8, 2) / 8)
        self.register_buffer("inv_freq", frequencies)
        self.register_buffer("scale", torch.tensor(3.0**0.5), persistent=False)
        self.register_buffer("turns", torch.polar(torch.ones(4), frequencies))
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("exact", torch.zeros(4, dtype=torch.float64))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.rotary = Rotary()
        self.norm = nn.LayerNorm(8)
        self.batch_norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.embed.weight
        self.accuracy = torchmetrics.MeanMetric()


def test_what_is_cast_and_what_is_kept():
    model = Model()
    before = {name: id(parameter) for name, parameter in model.named_parameters()}
    cast_module(model, BF16)
    assert dtypes(model) == {
        "embed.weight": BF16,
        "norm.weight": BF16,
        "norm.bias": BF16,
        "batch_norm.weight": FP32,
        "batch_norm.bias": FP32,
        "batch_norm.running_mean": FP32,
        "batch_norm.running_var": FP32,
        "batch_norm.num_batches_tracked": torch.int64,
        "rotary.inv_freq": FP32,
        "rotary.scale": FP32,
        "rotary.turns": torch.complex64,
        "rotary.mean": BF16,
        "rotary.count": torch.int64,
        "rotary.exact": torch.float64,
    }
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == before
    assert model.head.weight is model.embed.weight
    assert model.accuracy.mean_value.dtype == FP32  # pyright: ignore[reportAttributeAccessIssue]
    assert torch.get_default_dtype() == FP32


def test_undo_restores_every_dtype_and_the_values_that_bfloat16_holds():
    model = Model()
    before, weights = dtypes(model), model.embed.weight.detach().clone()
    undo = cast_module(model, BF16, keep_float32=["norm"])
    undo()
    assert dtypes(model) == before
    assert torch.equal(model.embed.weight, weights.to(BF16).float())


@pytest.mark.parametrize("pattern", ["norm", "*.weight", "LayerNorm", "n?rm.weight"])
def test_exceptions_by_name_or_class(pattern):
    model = Model()
    cast_module(model, BF16, keep_float32=[pattern])
    assert model.norm.weight.dtype == FP32
    assert model.norm.bias.dtype == (BF16 if "weight" in pattern else FP32)


def test_a_tied_weight_is_kept_if_one_of_its_names_is():
    model = Model()
    cast_module(model, BF16, keep_float32=["head"])
    assert model.embed.weight.dtype == FP32


def test_an_exception_that_matches_nothing_is_reported():
    with pytest.warns(NoEffectWarning, match=r"keep_float32='nrom' matches no module.*embed, rotary"):
        cast_module(Model(), BF16, keep_float32=["nrom"])


def test_exceptions_become_float32_in_a_model_built_in_bfloat16():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).to(BF16)
    cast_module(model, BF16, keep_float32=["0.bias"])
    assert dtypes(model)["0.bias"] == dtypes(model)["1.running_var"] == dtypes(model)["1.weight"] == FP32
    assert dtypes(model)["0.weight"] == BF16


def test_the_low_halves_make_the_cast_reversible():
    model = Model()
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    low_halves: dict[nn.Parameter, torch.Tensor] = {}
    cast_module(model, BF16, low_halves=low_halves)
    assert {id(p) for p in low_halves} == {id(p) for p in model.parameters() if p.dtype == BF16}
    for name, parameter in model.named_parameters():
        if parameter.dtype == BF16:
            assert torch.equal(join(parameter, low_halves[parameter]), weights[name])


def test_existing_gradients_follow():
    layer = nn.Linear(3, 3)
    layer(torch.ones(1, 3)).sum().backward()
    cast_module(layer, BF16)
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype == BF16
    layer(torch.ones(1, 3, dtype=BF16)).sum().backward()


def test_meta_modules_are_cast_without_values():
    layer = nn.Linear(3, 3, device="meta")
    low_halves: dict[nn.Parameter, torch.Tensor] = {}
    cast_module(layer, BF16, low_halves=low_halves)
    assert layer.weight.dtype == BF16
    assert not low_halves


def test_transformers_own_exceptions_and_rotary_tables():
    transformers = pytest.importorskip("transformers")
    t5 = transformers.T5ForConditionalGeneration(
        transformers.T5Config(d_model=16, d_kv=4, d_ff=32, num_layers=1, num_heads=2, vocab_size=50)
    )
    wrapper = nn.ModuleDict({"model": t5})
    cast_module(wrapper, BF16)
    kept = {name for name, dtype in dtypes(wrapper).items() if dtype == FP32}
    assert kept == {name for name in dtypes(wrapper) if ".wo." in name}
    assert kept
    llama = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
        )
    )
    table = llama.model.rotary_emb.inv_freq.clone()
    cast_module(llama, BF16)
    cast_inputs(llama, BF16)
    assert torch.equal(llama.model.rotary_emb.inv_freq, table)
    assert {p.dtype for p in llama.parameters()} == {BF16}
    ids = torch.randint(50, (2, 12))
    loss = llama(input_ids=ids, labels=ids).loss
    loss.backward()
    assert loss.item() == pytest.approx(math.log(50), rel=0.2)


def test_batch_norm_takes_bfloat16_and_keeps_float32_statistics():
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    cast_module(net, BF16)
    undo = cast_inputs(net, BF16)
    out = net(torch.randn(8, 3, 6, 6))
    out.float().sum().backward()
    assert out.dtype == BF16
    assert net[1].running_var.dtype == FP32
    net.eval()
    assert net(torch.randn(8, 3, 6, 6)).dtype == BF16
    undo()
    with pytest.raises(RuntimeError, match="type"):
        net(torch.randn(8, 3, 6, 6))


class Recorder(nn.Module):
    """Not a layer: has parameters of its own and children that have some too."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.linear = nn.Linear(4, 4)
        self.seen: list[torch.dtype] = []

    def forward(self, features, *, target):
        self.seen += [features.dtype, target.dtype]
        return self.scale * self.linear(features) - target


def test_only_layers_cast_their_inputs():
    model = Recorder()
    cast_module(model, BF16)
    cast_inputs(model, BF16)
    model(torch.randn(2, 4), target=torch.randn(2, 4))
    assert model.seen == [FP32, FP32]


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64, torch.bool])
def test_other_inputs_pass_as_they_are(dtype):
    class Echo(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, value, *, option=None):
            return value, option

    echo = Echo()
    cast_module(echo, BF16)
    cast_inputs(echo, BF16)
    value = torch.tensor([1, 0, 1]).to(dtype)
    out, option = echo(value, option=[torch.ones(2), "text"])
    assert out is value
    assert option[0].dtype == BF16
    assert option[1] == "text"


def test_layers_of_torch_take_float32():
    sequence = torch.randn(5, 2, 8)
    packed = nn.utils.rnn.pack_padded_sequence(sequence, torch.tensor([5, 3]))
    for layer, arguments in (
        (nn.LSTM(8, 8), (sequence, (torch.zeros(1, 2, 8), torch.zeros(1, 2, 8)))),
        (nn.GRU(8, 8), (packed,)),
        (nn.MultiheadAttention(8, 2), (sequence, sequence, sequence)),
        (nn.TransformerEncoderLayer(8, 2, 16), (sequence,)),
        (nn.Conv1d(2, 3, 1), (sequence,)),
    ):
        cast_module(layer, BF16)
        cast_inputs(layer, BF16)
        for training in (True, False):
            layer.train(training)
            with torch.no_grad():
                out = layer(*arguments)
            first = out[0] if isinstance(out, tuple) else out
            assert getattr(first, "data", first).dtype == BF16


def test_layers_kept_in_float32_take_bfloat16():
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    cast_module(net, BF16, keep_float32=["1"])
    cast_inputs(net, BF16)
    assert net[:2](torch.randn(2, 4)).dtype == FP32
    assert net(torch.randn(2, 4)).dtype == BF16


@pytest.mark.parametrize(
    "layer", [nn.Linear(3, 3), nn.LayerNorm(3), nn.GRU(3, 3), nn.MultiheadAttention(4, 2)]
)
def test_a_layer_of_torchs_own_is_cast_whole_or_not_at_all(layer: nn.Module) -> None:
    module = nn.Sequential(layer)
    first = next(name for name, _ in layer.named_parameters() if "." not in name)
    cast_module(module, torch.bfloat16, keep_float32=[f"0.{first}"])
    with pytest.raises(ValueError, match=rf"0\.{first} would stay in float32.*keep the whole layer: '0'"):
        cast_inputs(module, torch.bfloat16)
