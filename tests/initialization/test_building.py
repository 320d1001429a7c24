# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportIndexIssue=false, reportOptionalMemberAccess=false
import copy
import math
import weakref
from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_memkit.initialization.building import build_on
from lightning_memkit.initialization.casting import cast_module
from tests.activations.models import VOCABULARY, Stack

BF16 = torch.bfloat16


class Float32Bytes(TorchDispatchMode):
    """Counts the bytes of float32 storages alive at once: what a build stages beside the model."""

    def __init__(self):
        super().__init__()
        self.live = self.peak = 0
        self._known = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.dtype == torch.float32:
                self._add(tensor.untyped_storage())
        return out

    def _add(self, storage):
        key, size = storage._cdata, storage.nbytes()
        if key not in self._known:
            self.live += size
            self.peak = max(self.peak, self.live)
            self._known[key] = weakref.ref(storage, lambda _: self._remove(key, size))

    def _remove(self, key, size):
        del self._known[key]
        self.live -= size


def counted_build(build, dtype=BF16):
    torch.manual_seed(5)
    counter = Float32Bytes()
    with counter, build_on("cpu", dtype):
        module = build()
    return module, counter


def cast(build, dtype=BF16):
    """The oracle: a plain float32 build, then every parameter cast but those of BatchNorm."""
    torch.manual_seed(5)
    module = build()
    for part in module.modules():
        if not isinstance(part, _NormBase):
            for parameter in part.parameters(recurse=False):
                parameter.data = parameter.data.to(dtype)
    return module


def assert_same_parameters(ours, plain):
    mine, theirs = dict(ours.named_parameters()), dict(plain.named_parameters())
    assert mine.keys() == theirs.keys()
    for name, value in theirs.items():
        assert mine[name].dtype == value.dtype, name
        assert mine[name].requires_grad == value.requires_grad, name
        assert torch.equal(mine[name], value), name


class Hand(nn.Module):
    """Initialisation as people write it: own initialisers, aliases, ties, chunks, in-place arithmetic."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.empty(50, 8))
        self.gain = nn.Parameter(torch.ones(8))
        self.mix = nn.Linear(8, 24)
        self.head = nn.Linear(8, 50, bias=False)
        self.head.weight = self.table
        nn.init.trunc_normal_(self.table, std=0.02)
        self.gain.data *= 0.3
        with torch.no_grad():
            self.table[0].zero_()
            self.mix.weight.mul_(1 / math.sqrt(3)).add_(0.01)
            self.gain /= self.gain.norm()
            self.gain.copy_(self.mix.bias[:8])
        for part in self.mix.weight.chunk(3):
            nn.init.xavier_uniform_(part)
        nn.init.orthogonal_(self.mix.weight)
        frozen = nn.Parameter(torch.linspace(0, 1, 7), requires_grad=False)
        self.register_parameter("frozen", frozen)


class Aliased(nn.Module):
    """Initialises the tensor that a parameter was made of, and through a view taken earlier."""

    def __init__(self):
        super().__init__()
        weight = torch.empty(6, 4)
        self.weight = nn.Parameter(weight)
        nn.init.normal_(weight)
        self.other = nn.Parameter(torch.empty(5))
        view = self.other.data
        self.last = nn.Parameter(torch.ones(3))
        self.last.data.mul_(2)
        view.fill_(1 / 3)


class Replaced(nn.Module):
    """Gives parameters new values through `.data`, and new parameters."""

    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.empty(4))
        self.a.data = torch.rand(6)
        self.a.data.add_(1 / 3)
        self.b = nn.Parameter(self.a.data.clone())
        self.c = nn.Parameter(self.b.detach() * 2)
        self.list = nn.ParameterList([torch.rand(3), torch.rand(3)])


class BufferHeavy(nn.Module):
    """Tables, masks, positions and running values beside tied weights."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(9, 8)
        self.head = nn.Linear(8, 9, bias=False)
        self.head.weight = self.table.weight
        frequencies = 1 / 10000 ** (torch.arange(0, 8, 2).float() / 8)
        self.register_buffer("inv_freq", frequencies, persistent=False)
        angles = torch.outer(torch.arange(300.0), frequencies)
        self.register_buffer("rotation", torch.polar(torch.ones_like(angles), angles), persistent=False)
        self.register_buffer("positions", torch.arange(300)[None], persistent=False)
        self.register_buffer("mask", torch.ones(30, 30).tril().bool()[None, None])
        self.register_buffer("scale", torch.tensor(8.0).sqrt())
        self.norms = nn.ModuleList(nn.BatchNorm1d(8) for _ in range(2))


HAND_BUILT = {
    "hand": Hand,
    "aliased": Aliased,
    "replaced": Replaced,
    "stack": Stack,
    "encoder": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2),
    "copies": lambda: nn.ModuleList([block := nn.Linear(4, 4), copy.deepcopy(block)]),
    "lstm": lambda: nn.LSTM(4, 8, num_layers=2, bidirectional=True),
    "batchnorm": lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.PReLU()),
    "weight_norm": lambda: weight_norm(nn.Linear(4, 6)),
    "spectral_norm": lambda: spectral_norm(nn.Linear(4, 6)),
    "bilinear": lambda: nn.Bilinear(3, 4, 5),
    "padding": lambda: nn.EmbeddingBag(9, 4, padding_idx=2),
    "buffers": BufferHeavy,
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", HAND_BUILT)
def test_parameters_are_bitwise_those_of_float32_initialisation_then_cast(name, dtype):
    ours, _ = counted_build(HAND_BUILT[name], dtype)
    plain = cast(HAND_BUILT[name], dtype)
    assert_same_parameters(ours, plain)
    if name == "spectral_norm":
        return  # it computes its buffers from a rounded weight
    for key, value in plain.named_buffers():
        assert ours.get_buffer(key).dtype == value.dtype, key
        assert torch.equal(ours.get_buffer(key), value), key


def small(**options):
    width = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    return {**width, "intermediate_size": 64, **options}


TRANSFORMERS = {
    "LlamaForCausalLM": small(num_key_value_heads=2),
    "Qwen3ForCausalLM": small(num_key_value_heads=2, head_dim=8),
    "MistralForCausalLM": small(num_key_value_heads=2),
    "Gemma3ForCausalLM": small(num_key_value_heads=2, head_dim=8),
    "Phi3ForCausalLM": small(pad_token_id=0),
    "GPTNeoXForCausalLM": small(),
    "OPTForCausalLM": small(ffn_dim=64, word_embed_proj_dim=32),
    "MixtralForCausalLM": small(num_local_experts=4, num_key_value_heads=2),
    "Qwen3MoeForCausalLM": small(num_experts=4, num_key_value_heads=2, moe_intermediate_size=16),
    "MambaForCausalLM": small(),
    "GPT2LMHeadModel": {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4},
    "BertForMaskedLM": small(),
    "T5ForConditionalGeneration": {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 64},
    "ViTForImageClassification": small(image_size=32, patch_size=8),
    "ResNetForImageClassification": {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]},
    "ConvNextForImageClassification": {"hidden_sizes": [8, 16, 16, 16], "depths": [1, 1, 1, 1]},
    "WhisperForConditionalGeneration": {
        "vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "num_mel_bins": 8,
        "max_source_positions": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
        "decoder_start_token_id": 1,
    },
}  # fmt: skip
assert len(TRANSFORMERS) == 17


TIED = {
    "BertForMaskedLM", "GPT2LMHeadModel", "Gemma3ForCausalLM", "MambaForCausalLM", "OPTForCausalLM",
    "T5ForConditionalGeneration", "WhisperForConditionalGeneration",
}  # fmt: skip


def shared(module):
    """The names of what is one parameter under several names."""
    names = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return sorted(group for group in names.values() if len(group) > 1)


def transformers_build(name):
    import transformers

    cls = getattr(transformers, name)
    options = {key: value for key, value in TRANSFORMERS[name].items() if key != "none"}
    return lambda: cls(cls.config_class(**options))


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_transformers_models_equal_float32_then_cast_and_stage_one_tensor(name):
    build = transformers_build(name)
    ours, counter = counted_build(build)
    plain = cast(build)
    assert_same_parameters(ours, plain)
    assert shared(ours) == shared(plain)
    assert bool(shared(plain)) == (name in TIED)
    for key, value in plain.named_buffers():  # rotary tables, masks: as the constructor made them
        buffer = dict(ours.named_buffers())[key]
        assert buffer.dtype == value.dtype, key
        assert torch.equal(buffer, value), key
    largest = 4 * max(p.numel() for p in ours.parameters())
    kept = (*ours.buffers(), *(p for p in ours.parameters() if p.dtype == torch.float32))
    float32_buffers = sum(tensor.nbytes for tensor in kept if tensor.dtype == torch.float32)
    assert counter.live <= float32_buffers
    assert counter.peak <= largest + 2 * float32_buffers


def test_at_most_the_largest_parameter_is_staged_where_stock_builds_everything_in_float32():
    def build():
        return nn.Sequential(OrderedDict(table=nn.Embedding(400, 32), blocks=Stack(depth=8, width=32)))

    ours, counter = counted_build(build)
    stock = Float32Bytes()
    with stock:
        plain = build()
    parameters = sum(p.numel() for p in plain.parameters())
    largest = max(p.numel() for p in ours.parameters())
    assert stock.live == stock.peak == 4 * parameters
    assert counter.live == 0
    assert counter.peak == 4 * largest
    assert all(p.dtype == BF16 for p in ours.parameters())


def test_computed_tables_stay_float32_where_a_bfloat16_default_dtype_rounds_them():
    class Rotary(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("positions", torch.arange(0.0, 300.0))

    ours, _ = counted_build(Rotary)
    assert torch.equal(ours.positions, torch.arange(300).float())
    torch.set_default_dtype(BF16)
    try:
        rounded = Rotary()
    finally:
        torch.set_default_dtype(torch.float32)
    assert rounded.positions[-3:].tolist() == [296.0, 298.0, 300.0]


def test_what_casting_keeps_in_float32_is_built_so():
    ours, _ = counted_build(lambda: nn.BatchNorm2d(4))
    undo = cast_module(ours, BF16)
    assert ours.weight.dtype == ours.running_mean.dtype == torch.float32
    undo()
    assert ours.num_batches_tracked.dtype == torch.int64


def test_ties_stay_tied_and_objects_stay_the_same():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            weight = nn.Parameter(torch.rand(4, 4))
            self.first, self.second = weight, weight
            self.same = self.first is weight

    ours, _ = counted_build(Tied)
    assert ours.first is ours.second
    assert ours.same


def test_everything_is_as_before_after_the_context_and_after_an_error():
    def plain():
        return nn.Linear(2, 2).weight.dtype == torch.float32 and torch.get_default_dtype() == torch.float32

    class Failing(nn.Linear):
        def reset_parameters(self):
            raise RuntimeError("halfway")

    deepcopy = nn.Parameter.__deepcopy__
    counted_build(Hand)
    assert plain()
    with pytest.raises(RuntimeError, match="halfway"), build_on("cpu", BF16):
        Failing(2, 2)
    assert plain()
    assert nn.Parameter.__deepcopy__ is deepcopy


def test_the_module_trains():
    ours, _ = counted_build(lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1)))
    ours(torch.ones(2, 4, dtype=BF16)).sum().backward()
    assert all(p.is_leaf and p.grad is not None and p.grad.dtype == BF16 for p in ours.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_high_precision_is_the_default_dtype(dtype):
    with build_on("cpu", dtype):
        module = nn.Linear(2, 2)
    assert module.weight.dtype == dtype


def test_the_device_is_the_constructors_too():
    with build_on("meta", BF16):
        module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    assert {tensor.device.type for tensor in module.state_dict().values()} == {"meta"}
    assert module[0].weight.dtype == BF16


def test_nested_contexts_of_one_dtype_are_one_and_of_two_are_refused():
    with build_on("cpu", BF16):
        with build_on(None, BF16):
            inner = nn.Linear(2, 2)
        outer = nn.Linear(2, 2)
        with pytest.raises(ValueError, match="a module has one target dtype"), build_on("cpu", torch.float32):
            pass
    assert inner.weight.dtype == outer.weight.dtype == BF16


@pytest.mark.parametrize("dtype", [torch.int8, torch.complex64, torch.float8_e4m3fn])
def test_a_dtype_that_cannot_train_is_refused(dtype):
    with pytest.raises(ValueError, match="can't hold trainable parameters"), build_on("cpu", dtype):
        pass


def test_lazy_modules_are_left_to_their_first_forward():
    with build_on("cpu", BF16):
        module = nn.LazyLinear(3)
    module(torch.ones(2, 4))
    assert module.weight.shape == (3, 4)


def test_sharding_inside_the_context_takes_the_target_dtype(tmp_path):
    from torch import distributed
    from torch.distributed.fsdp import fully_shard

    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = distributed.init_device_mesh("cpu", (1,))
        torch.manual_seed(5)
        with build_on("cpu", BF16):
            module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
            fully_shard(module, mesh=mesh)
        plain = cast(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
        for name, parameter in module.named_parameters():
            assert parameter.dtype == BF16
            assert torch.equal(parameter.full_tensor(), plain.get_parameter(name))
        module(torch.ones(2, 4, dtype=BF16)).sum().backward()
    finally:
        distributed.destroy_process_group()
