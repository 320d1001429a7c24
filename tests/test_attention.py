import sys
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from jsonargparse import ArgumentParser
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import lightning_memkit
from lightning_memkit.attention import packed_attention
from lightning_memkit.data.collate import collate
from lightning_memkit.data.packing import pack
from lightning_memkit.data.store import TokenStore
from lightning_memkit.errors import MissingPackageError

CPU_BACKENDS = ("auto", "loop", "dense_mask")
# Two rows of 24: equal neighbours, a document of one token, one that fills its row.
BOUNDS = [0, 5, 10, 15, 22, 23, 24, 48]
# Beside float64: what one kernel over one document is allowed, several times over.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}


def inputs(key_heads: int = 4, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value, as a projection lays them out in memory."""
    generator = torch.Generator().manual_seed(0)

    def heads(count: int) -> Tensor:
        made = torch.randn(2, 24, count, 8, dtype=torch.float64, generator=generator)
        return made.to(dtype).transpose(1, 2).requires_grad_()

    return heads(4), heads(key_heads), heads(key_heads)


def document_by_document(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> Tensor:
    """Attention by its formula in float64, each document alone."""
    groups = query.size(1) // key.size(1)
    query, key, value = (x.double() for x in (query, key, value))
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    rows = []
    for row in range(2):
        outputs = []
        for begin, end in pairwise(b - 24 * row for b in BOUNDS if 24 * row <= b <= 24 * (row + 1)):
            q, k, v = (x[row, :, begin:end] for x in (query, key, value))
            scores = q @ k.transpose(-1, -2) * scale
            if causal:
                later = torch.ones(end - begin, end - begin).triu(1).bool()
                scores = scores.masked_fill(later, -torch.inf)
            outputs.append(scores.softmax(-1) @ v)
        rows.append(torch.cat(outputs, 1))
    return torch.stack(rows)


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("key_heads", [4, 2, 1])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("scale", [None, 0.7])
def test_outputs_and_gradients_are_those_of_documents_alone(backend, causal, key_heads, dtype, scale):
    ours = query, key, value = inputs(key_heads, dtype)
    truth = [x.detach().double().requires_grad_() for x in ours]
    bounds = torch.tensor(BOUNDS, dtype=torch.int32)
    output = packed_attention(query, key, value, bounds, causal=causal, scale=scale, backend=backend)
    expected = document_by_document(*truth, causal=causal, scale=scale or 8**-0.5)
    weights = torch.randn(expected.shape, dtype=torch.float64)
    (output.double() * weights).sum().backward()
    (expected * weights).sum().backward()
    assert output.dtype == dtype
    torch.testing.assert_close(output.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    for mine, true in zip(ours, truth, strict=True):
        assert mine.grad is not None
        assert true.grad is not None
        torch.testing.assert_close(
            mine.grad.double(), true.grad, atol=3 * TOLERANCE[dtype], rtol=TOLERANCE[dtype]
        )


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_a_change_in_one_document_changes_no_other(backend):
    bounds = torch.tensor(BOUNDS, dtype=torch.int32)
    before = packed_attention(*inputs(), bounds, causal=False, backend=backend)
    changed = query, key, value = [x.detach().clone() for x in inputs()]
    for x in changed:
        x[0, :, 5:10] += 1.0
    after = packed_attention(query, key, value, bounds, causal=False, backend=backend)
    same = torch.ones(2, 24, dtype=torch.bool)
    same[0, 5:10] = False
    by_token = (after - before).abs().amax((1, 3))
    assert by_token[same].max() == 0
    assert by_token[~same].min() > 1e-3


def test_without_bounds_it_is_torchs_own():
    query, key, value = inputs(key_heads=2)
    expected = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    assert torch.equal(packed_attention(query, key, value), expected)


def test_without_bounds_queries_may_be_fewer_than_keys():
    query, key, value = (x.detach() for x in inputs())
    assert packed_attention(query[:, :, :1], key, value, causal=False).shape == (2, 4, 1, 8)


class Bytes(TorchDispatchMode):
    """The largest tensor that an operator makes."""

    largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor):
                self.largest = max(self.largest, tensor.untyped_storage().nbytes())
        return result


def test_the_loop_makes_nothing_larger_than_the_query():
    """Neither a mask of tokens squared nor a gradient of the whole size for every document."""
    query, key, value = inputs()
    with Bytes() as counted:
        packed_attention(query, key, value, torch.tensor(BOUNDS, dtype=torch.int32)).sum().backward()
    assert counted.largest == query.untyped_storage().nbytes()


@pytest.mark.parametrize("bounds", [[0, 5, 24], [1, 24, 48], [0, 24, 60]])
def test_bounds_that_do_not_cover_the_batch_are_refused(bounds):
    with pytest.raises(ValueError, match=r"it runs from 0 to batch \* tokens = 48"):
        packed_attention(*inputs(), torch.tensor(bounds, dtype=torch.int32), backend="loop")


def test_an_unknown_backend_is_refused():
    with pytest.raises(ValueError, match="backend='flash' is unknown; choose one of .*flash_attn"):
        packed_attention(*inputs(), backend="flash")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("backend", ["flash_attn", "varlen"])
def test_a_backend_that_can_not_run_here_is_refused_and_not_replaced(backend):
    bounds = torch.tensor(BOUNDS, dtype=torch.int32)
    with pytest.raises(ValueError, match=f"backend='{backend}' can't run on torch.float32 on cpu.*bfloat16"):
        packed_attention(*inputs(), bounds, backend=backend)


def test_heads_that_can_not_be_grouped_and_unequal_tokens_are_refused():
    query, key, value = inputs()
    with pytest.raises(ValueError, match="4 query heads can't share 3 key heads"):
        packed_attention(query, key[:, :3], value[:, :3])
    with pytest.raises(ValueError, match="1 queries face 24 keys"):
        packed_attention(query[:, :, :1], key, value, torch.tensor([0, 2], dtype=torch.int32))


class OnCuda:
    """What the choice of a backend asks of a tensor."""

    device, dtype = torch.device("cuda:0"), torch.bfloat16


@pytest.mark.parametrize(
    ("installed", "capability", "chosen"),
    [
        ({"flash_attn", "torch.nn.attention.varlen"}, (8, 0), "flash_attn"),
        ({"torch.nn.attention.varlen"}, (9, 0), "varlen"),
        (set(), (9, 0), "loop"),
        ({"flash_attn", "torch.nn.attention.varlen"}, (7, 5), "loop"),
    ],
)
def test_the_choice_on_cuda(monkeypatch, installed, capability, chosen):
    attention = sys.modules["lightning_memkit.attention"]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(attention, "_importable", lambda module: module in installed)
    assert attention._choose(OnCuda()) == chosen
    if "flash_attn" not in installed and capability >= (8, 0):
        assert isinstance(attention._refusal("flash_attn", OnCuda()), MissingPackageError)


@pytest.mark.parametrize("version", ["2.10", "2.13"])
def test_torchs_varlen_kernel_is_called_as_its_version_asks(monkeypatch, version):
    """A stand-in with the version's arguments, computed by the loop: shapes, order and options are right."""
    attention = sys.modules["lightning_memkit.attention"]
    given = {}

    def computed(query, key, value, bounds, **options):
        given.update(options)
        one_row = (x.transpose(0, 1)[None] for x in (query, key, value))
        documents = attention._Documents(bounds, None, True, options.get("scale"))
        return attention._loop(*one_row, documents)[0].transpose(0, 1)

    def old(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False):
        assert (max_q, max_k) == (24, 24)
        return computed(query, key, value, cu_seq_q, is_causal=is_causal)

    def new(
        query,
        key,
        value,
        cu_seq_q,
        cu_seq_k,
        max_q,
        max_k,
        *,
        scale=None,
        window_size=(-1, -1),
        enable_gqa=False,
    ):
        assert (max_q, max_k) == (24, 24)
        return computed(
            query, key, value, cu_seq_q, scale=scale, window_size=window_size, enable_gqa=enable_gqa
        )

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", old if version == "2.10" else new)
    query, key, value = inputs(key_heads=2, dtype=torch.float64)
    documents = attention._Documents(torch.tensor(BOUNDS, dtype=torch.int32), None, True, 0.7)
    expected = document_by_document(query, key, value, causal=True, scale=0.7)
    torch.testing.assert_close(attention._varlen(query, key, value, documents).double(), expected)
    if version == "2.10":
        assert given == {"is_causal": True}
    else:
        assert given == {"scale": 0.7, "window_size": (-1, 0), "enable_gqa": True}


def test_a_yaml_can_name_it():
    def build(attention: Callable = F.scaled_dot_product_attention):
        return attention

    parser = ArgumentParser(exit_on_error=False)
    parser.add_function_arguments(build)
    config = parser.parse_object({"attention": "lightning_memkit.packed_attention"})
    assert config.attention is lightning_memkit.packed_attention is packed_attention


class SmallModel(nn.Module):
    """Embeds tokens and positions, attends twice, and gives logits."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(50, 32), nn.Embedding(64, 32)
        self.projections = nn.ModuleList(nn.Linear(32, 96) for _ in range(2))
        self.logits = nn.Linear(32, 50)

    def forward(self, input_ids: Tensor, position_ids: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        hidden = self.tokens(input_ids) + self.positions(position_ids)
        for projection in self.projections:
            heads = projection(hidden).unflatten(-1, (12, 8)).transpose(1, 2)
            query, key, value = heads.chunk(3, 1)
            attended = packed_attention(query, key, value, cu_seqlens)
            hidden = hidden + attended.transpose(1, 2).flatten(2)
        return self.logits(hidden)


def packed_batch(documents: list[list[int]]):
    store = TokenStore.of(documents)
    packing = pack(store.lengths, 32)
    return packing, collate(store, packing, range(packing.rows))


def logits_of(model: SmallModel, batch) -> Tensor:
    with torch.no_grad():
        return model(batch["input_ids"], batch["position_ids"], batch["cu_seqlens"])


def test_a_packed_batch_gives_the_logits_of_documents_alone():
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 20, (25,), generator=generator).tolist()
    documents = [torch.randint(0, 50, (n,), generator=generator).tolist() for n in lengths]
    model = SmallModel()
    packing, batch = packed_batch(documents)
    assert batch.rows > 3
    packed = logits_of(model, batch)
    for row in range(packing.rows):
        begin = 0
        for piece in range(packing.offsets[row], packing.offsets[row + 1]):
            ids = torch.tensor([documents[packing.documents[piece]]])
            with torch.no_grad():
                alone = model(ids, torch.arange(ids.size(1))[None])[0]
            torch.testing.assert_close(packed[row, begin : begin + ids.size(1)], alone, atol=1e-5, rtol=0)
            begin += ids.size(1)


def test_another_token_in_one_document_changes_no_logit_of_another():
    documents = [[1, 2, 3, 4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15, 16], [17, 18]]
    model = SmallModel()
    _, batch = packed_batch(documents)
    before = logits_of(model, batch)
    batch["input_ids"][0, 7] = 40  # the first token of the second document in the row
    after = logits_of(model, batch)
    begin, end = batch["cu_seqlens"][1:3].tolist()
    assert begin == 7
    difference = (after - before).abs().amax(-1)[0]
    assert difference[begin:end].min() > 1e-4
    difference[begin:end] = 0
    assert difference.max() == 0
