# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
"""Every policy beside what models are trained with: the gradients are those of the same model without it."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch.testing._internal.two_tensor import TwoTensor

from lightning_memkit import checkpoint_modules, use_packed_attention
from lightning_memkit.memory.meter import ByteMeter
from tests.activations.models import (
    SMALL,
    VOCABULARY,
    Block,
    ConvNet,
    Stack,
    in_4_bits,
    in_int8,
    lora_model,
    transformers_model,
)

# peft asks transformers by the old name, and would like to know how to merge int8.
pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning",
    "ignore:TorchaoLoraLinear was instantiated without `get_apply_tensor_subclass`",
)
SAMPLE = ["selective", "budget:0.5"]
SWEEP = ["full", "every:2", "selective:mm,silu", "budget:64KiB", "auto:512KiB"]


def ids():
    return torch.randint(3, VOCABULARY, (2, 16), generator=torch.Generator().manual_seed(1))


def labelled(**more):
    return {"input_ids": ids(), "labels": ids(), **more}


def images():
    return torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def packed():
    return labelled(cu_seqlens=torch.tensor([0, 5, 16, 19, 32], dtype=torch.int32), max_seqlen=13)


def positions():
    rows = torch.cat([torch.arange(5), torch.arange(11)]).expand(2, -1)
    return labelled(position_ids=rows.contiguous())


def llama(**options):
    import transformers

    config = {**SMALL, "num_key_value_heads": 2, "attention_dropout": 0.1, "use_cache": False, **options}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**config))


def cached(name):
    model = transformers_model(name)
    model.config.use_cache = True
    return model


class Tied(nn.Module):
    """Weights shared with the head and between blocks, and one block that is called three times."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 32)
        shared = Block(32, 0.1)
        self.blocks = nn.ModuleList([shared, Block(32, 0.1), shared, Block(32, 0.1), shared])
        self.blocks[3].mix[0].weight = self.blocks[1].mix[0].weight

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return x @ self.embedding.weight.t()


def frozen_norms():
    """As in fine-tuning: statistics and weights of BatchNorm stay, the convolutions are trained."""
    model = ConvNet().train()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
            module.requires_grad_(False)
    return model


@dataclass(frozen=True, kw_only=True)
class Case:
    """What a model is trained with."""

    build: Callable[[], nn.Module]
    batch: Callable[[], Any] = labelled
    packed: bool = False
    autocast: bool = False
    backward_inside: bool = False
    training: bool = True


no_dropout = partial(llama, attention_dropout=0.0)
CASES = {
    "cu_seqlens": Case(build=no_dropout, batch=packed, packed=True),
    "cu_seqlens, dropout": Case(build=llama, batch=packed, packed=True),
    "cu_seqlens, GPT-2": Case(
        build=partial(transformers_model, "GPT2LMHeadModel"), batch=packed, packed=True
    ),
    "cu_seqlens, both directions": Case(
        build=partial(transformers_model, "BertForMaskedLM"), batch=packed, packed=True
    ),
    "positions that begin anew": Case(build=no_dropout, batch=positions, packed=True),
    "positions, the model's own mask": Case(build=llama, batch=positions),
    "LoRA": Case(build=partial(lora_model, dropout=0.1)),
    "LoRA in the last layer": Case(build=partial(lora_model, layers=[1])),
    "LoRA over 4 bits": Case(build=partial(lora_model, quantized=in_4_bits)),
    "LoRA over int8": Case(build=partial(lora_model, quantized=in_int8)),
    "LoRA, packed": Case(build=partial(lora_model, attention_dropout=0.0), batch=packed, packed=True),
    "LoRA, packed, bfloat16 by autocast": Case(
        build=partial(lora_model, attention_dropout=0.0), batch=packed, packed=True, autocast=True
    ),
    "frozen BatchNorm": Case(build=frozen_norms, batch=images, training=False),
    "BatchNorm": Case(build=ConvNet, batch=images),
    "tied head": Case(build=partial(llama, tie_word_embeddings=True)),
    "tied blocks": Case(build=Tied, batch=ids),
    "autocast": Case(build=Stack, batch=ids, autocast=True),
    "autocast, backward inside": Case(build=Stack, batch=ids, autocast=True, backward_inside=True),
    "autocast, BatchNorm": Case(build=ConvNet, batch=images, autocast=True),
    "autocast, Llama": Case(build=llama, autocast=True),
    "autocast, experts": Case(build=partial(transformers_model, "MixtralForCausalLM"), autocast=True),
    "a cache by config, Llama": Case(build=partial(llama, use_cache=True)),
    "a cache by config, GPT-2": Case(build=partial(cached, "GPT2LMHeadModel")),
    "experts' own loss": Case(
        build=partial(transformers_model, "Qwen3MoeForCausalLM"),
        batch=partial(labelled, output_router_logits=True),
    ),
    "hidden states": Case(build=llama, batch=partial(labelled, output_hidden_states=True)),
    "padding": Case(
        build=llama, batch=partial(labelled, attention_mask=(torch.arange(16) > 2).long().expand(2, -1))
    ),
}


def built(case):
    """The same weights at every call: what `use_packed_attention` adds is not copied with a model."""
    torch.manual_seed(0)
    model = case.build()
    if case.training:
        model.train()
    if case.packed:
        use_packed_attention(model)
    return model


def step(model, case):
    model.zero_grad()
    batch = case.batch()
    torch.manual_seed(3)
    with torch.autocast("cpu", torch.bfloat16, enabled=case.autocast):
        out = model(**batch) if isinstance(batch, dict) else model(batch)
        loss = out.loss if isinstance(batch, dict) else out.float().square().mean()
        if case.backward_inside:
            loss.backward()
    if not case.backward_inside:
        loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    found |= {f"buffer {name}": buffer.clone() for name, buffer in model.named_buffers()}
    return {"loss": loss.detach(), **found, "rng": torch.get_rng_state()}


def alive_bytes(model, case):
    """Bytes of what a forward has made and is alive at its end."""
    batch = case.batch()
    with (
        ByteMeter() as meter,
        torch.autocast("cpu", torch.bfloat16, enabled=case.autocast, cache_enabled=False),
    ):
        out = model(**batch) if isinstance(batch, dict) else model(batch)
        found = meter.live_bytes
    del out
    return found


def assert_same(ours, plain, close=None):
    assert ours.keys() == plain.keys()
    for name, value in plain.items():
        if close is None:
            assert torch.equal(ours[name], value), name
        else:
            torch.testing.assert_close(
                ours[name], value, **close, msg=lambda text, name=name: f"{name}: {text}"
            )


COMPILER = (
    "ignore:.* does not lower the peak",
    "ignore:The KV cache stays empty",
    "ignore:.*script_method. is deprecated:DeprecationWarning",
    "ignore:The .grad attribute of a Tensor that is not a leaf",
)
CLOSE = {"rtol": 1e-4, "atol": 1e-6}
POLICIES = [*SAMPLE, *(pytest.param(policy, marks=pytest.mark.slow) for policy in SWEEP)]


@pytest.mark.sampled(7)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings(
    "ignore:The budget of .* can't be met",
    "ignore:The KV cache stays empty",
    "ignore:.*stand for several",
    "ignore:No operator of the blocks matches",  # GPT-2 and BatchNorm's model have no "mm"
)
def test_gradients_buffers_and_random_numbers_are_bitwise_those_of_the_plain_model(name, policy):
    case = CASES[name]
    model, ours = built(case), built(case)
    checkpoint_modules(ours, policy)
    close = None
    if "cache" in name and policy == "full":
        model.config.use_cache = False  # so it trains
    elif "cache" in name and policy == "every:2":
        close = CLOSE  # one block with a cache, one without: their keys' strides differ, and with them the rounding
    for _ in range(3):  # budgets measure, then plan
        assert_same(step(ours, case), step(model, case), close)


@pytest.mark.parametrize("policy", ["full", *SAMPLE])
@pytest.mark.parametrize("name", ["cu_seqlens", "LoRA", "tied blocks", "autocast", "autocast, experts"])
@pytest.mark.filterwarnings("ignore:The budget of .* can't be met")
def test_less_is_kept(name, policy):
    case = CASES[name]
    model = built(case)
    plain = alive_bytes(model, case)
    checkpoint_modules(model, policy)
    step(model, case)
    assert alive_bytes(model, case) < 0.9 * plain


def without_dropout(model):
    """Compiled blocks draw random numbers of their own."""
    for module in model.modules():
        for name in ("p", "attention_dropout", "dropout_prob"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model


COMPILED = [
    "cu_seqlens", "positions, the model's own mask", "LoRA", "LoRA, packed", "BatchNorm", "frozen BatchNorm",
    "tied blocks", "autocast", "autocast, backward inside", "autocast, BatchNorm", "autocast, Llama",
    "autocast, experts", "a cache by config, Llama", "a cache by config, GPT-2", "experts' own loss", "padding",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPILED)
@pytest.mark.filterwarnings(*COMPILER)
def test_compiled_blocks_are_the_plain_model_up_to_rounding(name):
    torch._dynamo.reset()
    case = CASES[name]
    model, ours = without_dropout(built(case)), without_dropout(built(case))
    checkpoint_modules(ours, "compile:0.5")
    counters.clear()
    for _ in range(2):
        true = step(copy.deepcopy(model), replace(case, autocast=False)) if case.autocast else None
        mine, plain = step(ours, case), step(model, case)
        if (
            true is not None
        ):  # the compiler rounds less often; both are judged by how far they are from float32
            assert_as_near(mine, plain, true)
            model.load_state_dict(ours.state_dict())
        else:
            assert_same(mine, plain, CLOSE)
    assert counters["stats"]["unique_graphs"] > 0


def assert_as_near(ours, plain, true):
    assert ours.keys() == plain.keys()
    for name, value in true.items():
        if value.is_floating_point():
            allowed = 1.5 * (plain[name] - value).norm() + 2**-8 * value.norm()
            assert (ours[name] - value).norm() <= allowed, name
        elif name != "rng":
            assert torch.equal(ours[name], value), name


@pytest.mark.slow
@pytest.mark.filterwarnings(*COMPILER)
def test_all_layers_of_a_model_with_a_cache_share_one_graph():
    torch._dynamo.reset()
    model = llama(use_cache=True, num_hidden_layers=10, attention_dropout=0.0).train()
    checkpoint_modules(model, "compile:1")
    counters.clear()
    model(**labelled()).loss.backward()
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["recompile_limit"]


def matmuls_again(model):
    """The matrix products in the backward of a compiled model beyond two for each of the forward."""
    counts = []

    def count(graph, inputs):
        targets = [str(node.target) for node in graph.graph.nodes]
        counts.append(sum(target in ("aten.mm.default", "aten.addmm.default") for target in targets))
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    backend = aot_autograd(
        fw_compiler=count, bw_compiler=count, partition_fn=min_cut_rematerialization_partition
    )
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    model.zero_grad()
    compiled(ids()).square().mean().backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    forward, backward = counts
    return backward - 2 * forward, gradients


# The compiler keeps more than the blocks' inputs where that costs no bytes.
@pytest.mark.parametrize(
    ("policy", "again"),
    [
        ("full", range(4, 9)),
        pytest.param("every:2", range(2, 5), marks=pytest.mark.slow),
        ("selective", range(4)),
        pytest.param("selective:matmul", range(1), marks=pytest.mark.slow),
    ],
)
@pytest.mark.long
def test_a_compiled_model_makes_again_what_the_policy_says(policy, again):
    model = Stack(depth=4, dropout=0.0).train()
    ours = copy.deepcopy(model)
    none, plain = matmuls_again(model)
    checkpoint_modules(ours, policy)
    more, mine = matmuls_again(ours)
    assert_same(mine, plain)
    assert more - none in again


@pytest.mark.parametrize("policy", ["budget:0.5", "auto:1MiB", "compile:0.5"])
@pytest.mark.parametrize("of", ["the model", "a block"])
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo asks for it
def test_what_can_not_be_compiled_around_says_so(policy, of):
    torch._dynamo.reset()
    model = Stack(depth=2).train()
    checkpoint_modules(model, policy)
    if of == "the model":
        run = torch.compile(model, backend="eager")
    else:
        model.blocks[0] = torch.compile(model.blocks[0], backend="eager")
        run = model
    word = "compile" if policy.startswith("compile") else "budget"
    with pytest.raises(RuntimeError, match=rf'policy="{word}:x".* compiled around'):
        run(ids())


@pytest.mark.parametrize("policy", SAMPLE)
def test_a_block_that_gets_tensors_that_stand_for_several_is_made_again_as_a_whole(policy):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Sequential(nn.Linear(8, 8), nn.GELU())

        def forward(self, x, *, scales):
            return self.layer(x) * scales[0].a

    model = nn.Module()
    model.blocks = nn.ModuleList([Scaled(), Scaled()])
    model.forward = lambda x: model.blocks[1](model.blocks[0](x, scales=both), scales=both)
    both = (TwoTensor(torch.full((8,), 0.5), torch.ones(8)),)
    x = torch.randn(4, 8)
    model(x).sum().backward()
    plain = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    checkpoint_modules(model, policy)
    with pytest.warns(UserWarning, match="stand for several .* recomputed as a whole"):
        model(x).sum().backward()
    assert_same({name: p.grad for name, p in model.named_parameters()}, plain)
