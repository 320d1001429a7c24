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
from lightning_memkit.data.batching.collate import collate
from lightning_memkit.data.packing.pack import pack
from lightning_memkit.data.sources.token_records import token_store

pytestmark = pytest.mark.filterwarnings("ignore:backend='dense_mask' makes a mask")

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


def document_by_document(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
) -> Tensor:
    """Attention by its formula in float64, each document alone."""
    groups = query.size(1) // key.size(1)
    query, key, value = (x.double() for x in (query, key, value))
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    rows = []
    for row in range(2):
        outputs = []
        for begin, end in pairwise(b - 24 * row for b in BOUNDS if 24 * row <= b <= 24 * (row + 1)):
            q, k, v = (x[row, :, begin:end] for x in (query, key, value))
            scores = q @ k.transpose(-1, -2) * (scale or 8**-0.5)
            ahead = torch.arange(end - begin) - torch.arange(end - begin)[:, None]
            if softcap:
                scores = softcap * (scores / softcap).tanh()
            if alibi_slopes is not None:
                scores = scores - alibi_slopes.double()[:, None, None] * ahead.abs()
            if causal:
                scores = scores.masked_fill(ahead > 0, -torch.inf)
            if window:
                scores = scores.masked_fill(ahead.abs() >= window, -torch.inf)
            outputs.append(scores.softmax(-1) @ v)
        rows.append(torch.cat(outputs, 1))
    return torch.stack(rows)


def assert_as_alone(backend: str, key_heads: int, dtype: torch.dtype, **options) -> None:
    """Outputs and gradients of a packed batch are those of its documents in float64."""
    ours = query, key, value = inputs(key_heads, dtype)
    truth = [x.detach().double().requires_grad_() for x in ours]
    bounds = torch.tensor(BOUNDS, dtype=torch.int32)
    output = packed_attention(query, key, value, bounds, backend=backend, **options)  # pyright: ignore[reportArgumentType]
    expected = document_by_document(*truth, **options)
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
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("key_heads", [4, 2, 1])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("scale", [None, 0.7])
def test_outputs_and_gradients_are_those_of_documents_alone(backend, causal, key_heads, dtype, scale):
    assert_as_alone(backend, key_heads, dtype, causal=causal, scale=scale)


SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("key_heads", [4, 2])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    "options",
    [
        {"window": 1},
        {"window": 3},
        {"window": 100},
        {"softcap": 0.5},
        {"alibi_slopes": SLOPES},
        {"softcap": 2.0, "alibi_slopes": SLOPES, "window": 6, "scale": 0.7},
    ],
    ids=["window 1", "window 3", "window 100", "softcap", "alibi", "all"],
)
def test_windows_caps_and_slopes_too(backend, causal, key_heads, dtype, options):
    assert_as_alone(backend, key_heads, dtype, causal=causal, **options)


@pytest.mark.parametrize("window", [1, 3, 7])
@pytest.mark.parametrize("causal", [True, False])
def test_a_window_in_blocks_is_the_window(monkeypatch, window, causal):
    """Documents of many blocks: with blocks of two queries the short test documents are."""
    monkeypatch.setattr("lightning_memkit.attention.in_torch._LEAST_BLOCK", 2)
    assert_as_alone("loop", 2, torch.float64, window=window, causal=causal)


def test_a_window_takes_scores_of_length_times_window():
    query = torch.randn(1, 1, 4096, 8, requires_grad=True)
    bounds = torch.tensor([0, 4096], dtype=torch.int32)
    with Bytes() as counted:
        packed_attention(query, query, query, bounds, window=64, backend="loop").sum().backward()
    # A block of 256 queries and the 63 keys before it, as float scores; squared it would be 64 MiB.
    assert counted.largest <= 256 * (256 + 63) * 4


@pytest.mark.parametrize("options", [{"window": 3}, {"softcap": 1.0}, {"alibi_slopes": SLOPES}])
def test_without_bounds_every_row_is_a_document(options):
    query, key, value = inputs()
    bounds = torch.tensor([0, 24, 48], dtype=torch.int32)
    expected = packed_attention(query, key, value, bounds, **options)
    assert torch.equal(packed_attention(query, key, value, **options), expected)


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("options", [{}, {"softcap": 5.0}, {"window": 4}], ids=["plain", "softcap", "window"])
def test_dropout_drops_its_share_and_scales_the_rest(backend, options):
    """With the identity as values the output is the weights themselves."""
    torch.manual_seed(0)
    query, key = torch.randn(2, 1, 4, 200, 64)
    value = torch.eye(64).repeat(4, 1)[:200].expand(1, 4, 200, 64)
    bounds = torch.tensor([0, 64, 128, 192, 200], dtype=torch.int32)
    kept = packed_attention(query, key, value, bounds, backend=backend, **options)
    dropped = packed_attention(query, key, value, bounds, dropout_p=0.25, backend=backend, **options)
    survives = dropped != 0
    assert abs(survives.sum() / (kept != 0).sum() - 0.75) < 0.03
    torch.testing.assert_close(dropped[survives], kept[survives] / 0.75)


def test_a_dense_mask_is_warned_of_with_its_bytes():
    query = torch.randn(2, 1, 512, 8)
    with pytest.warns(UserWarning, match=r"batch \* tokens \* tokens = 512.0 KiB"):
        packed_attention(query, query, query, torch.tensor([0, 512, 1024]), backend="dense_mask")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 0}, "window=0 is below 1"),
        ({"dropout_p": 1.0}, r"dropout_p=1.0 is outside \[0, 1\)"),
        ({"softcap": -1.0}, "softcap=-1.0 is not above 0"),
        ({"alibi_slopes": torch.ones(3)}, r"alibi_slopes has the shape \(3,\); it is \(4,\)"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        packed_attention(*inputs(), **options)


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


@pytest.mark.parametrize("backend", ["loop", "dense_mask"])
@pytest.mark.parametrize("bounds", [[0, 5, 24], [1, 24, 48], [0, 24, 60]])
def test_bounds_that_do_not_cover_the_batch_are_refused(bounds, backend):
    with pytest.raises(ValueError, match=r"it runs from 0 to batch \* tokens = 48"):
        packed_attention(*inputs(), torch.tensor(bounds, dtype=torch.int32), backend=backend)


@pytest.mark.parametrize("backend", ["loop", "dense_mask"])
@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        (torch.tensor([0, 10, 30, 48]), "goes from 10 to 30 across the end of a row, 24"),
        (torch.tensor([0, 48]), "goes from 0 to 48 across the end of a row, 24"),
        (torch.tensor([0, 20, 10, 24, 48]), "falls from 20 to 10"),
        (torch.tensor([[0, 24, 48]]), r"is torch.int64 of shape \(1, 3\)"),
        (torch.tensor([0.0, 24.0, 48.0]), r"is torch.float32 of shape \(3,\)"),
    ],
)
def test_bounds_across_rows_and_of_another_form_are_refused(bounds, message, backend):
    with pytest.raises(ValueError, match=f"cu_seqlens {message}"):
        packed_attention(*inputs(), bounds, backend=backend)


def test_documents_without_a_token_change_nothing():
    query, key, value = inputs()
    bounds = torch.tensor([0, 0, 10, 24, 24, 24, 48, 48], dtype=torch.int32)
    expected = packed_attention(query, key, value, torch.tensor([0, 10, 24, 48], dtype=torch.int32))
    assert torch.equal(packed_attention(query, key, value, bounds), expected)


@pytest.mark.parametrize("bounds", [None, torch.tensor([0, 24, 48], dtype=torch.int32)])
def test_shapes_that_do_not_fit_are_refused(bounds):
    query, key, value = inputs()
    for wrong, message in (
        ((query[0], key[0], value[0]), "query has the shape"),
        ((query, key, value[:, :2]), "value has the shape"),
        ((query, key[:1], value[:1]), "key has the shape"),
        ((query, key, value[:, :, :3]), "value has the shape"),
        ((query, key[..., :4], value), "key has the shape"),
    ):
        with pytest.raises(ValueError, match=message):
            packed_attention(*wrong, bounds)


@pytest.mark.parametrize("backend", ["flash_attn", "varlen", "flex"])
def test_a_named_backend_is_refused_without_bounds_too(backend):
    with pytest.raises(ValueError, match=f"backend='{backend}' can't run on torch.float32 on cpu"):
        packed_attention(*inputs(), backend=backend)


def test_a_named_backend_is_used_without_bounds_too():
    query, key, value = inputs()
    with pytest.warns(UserWarning, match="dense_mask"):
        out = packed_attention(query, key, value, backend="dense_mask")
    torch.testing.assert_close(out, packed_attention(query, key, value))
    with pytest.raises(ValueError, match='backend="auto" and "loop" know more keys than queries'):
        packed_attention(query[:, :, :1], key, value, backend="dense_mask")


def test_an_unknown_backend_is_refused():
    with pytest.raises(ValueError, match="backend='flash' is unknown; choose one of .*flash_attn"):
        packed_attention(*inputs(), backend="flash")  # pyright: ignore[reportArgumentType]


def test_heads_that_can_not_be_grouped_and_unequal_tokens_are_refused():
    query, key, value = inputs()
    with pytest.raises(ValueError, match="4 query heads can't share 3 key heads"):
        packed_attention(query, key[:, :3], value[:, :3])
    with pytest.raises(ValueError, match="1 queries face 24 keys"):
        packed_attention(query[:, :, :1], key, value, torch.tensor([0, 2], dtype=torch.int32))


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
    store = token_store(documents)
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
