"""What of the GPU's backends can be tested without one: their choice, and how they call their kernels."""

import sys
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

from lightning_memkit.attention import choice, flex, in_torch, kernels, packed_attention
from lightning_memkit.attention.documents import Documents
from lightning_memkit.attention.kernels import varlen_knows_windows
from lightning_memkit.memory.meter import ByteMeter
from lightning_memkit.utilities.errors import MissingPackageError
from tests.attention.test_door import BOUNDS, SLOPES, document_by_document, inputs
from tests.testing.needs import NEEDS_COMPILER

ALL = {"flash_attn", "torch.nn.attention.varlen", "triton"}


class OnCuda:
    """What the choice of a backend asks of a tensor."""

    device = torch.device("cuda:0")

    def __init__(self, dtype: torch.dtype = torch.bfloat16, features: int = 64) -> None:
        self.dtype, self.features = dtype, features

    def size(self, dimension: int) -> int:
        assert dimension == -1
        return self.features


@pytest.fixture
def machine(monkeypatch):
    def pretend(installed: set[str], capability: tuple[int, int] = (9, 0)) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
        monkeypatch.setattr(choice, "_importable", lambda module: module in installed)

    return pretend


def documents(**options) -> Documents:
    return Documents(cu_seqlens=torch.tensor(BOUNDS, dtype=torch.int32), **options)


@pytest.mark.parametrize("backend", ["flash_attn", "varlen", "flex"])
def test_a_backend_that_can_not_run_here_is_refused_and_not_replaced(backend):
    bounds = torch.tensor(BOUNDS, dtype=torch.int32)
    with pytest.raises(ValueError, match=f"backend='{backend}' can't run on torch.float32 on cpu.*bfloat16"):
        packed_attention(*inputs(), bounds, backend=backend)


HALF, SINGLE, DOUBLE = torch.bfloat16, torch.float32, torch.float64


@pytest.mark.parametrize(
    ("installed", "capability", "dtype", "options", "chosen"),
    [
        (ALL, (8, 0), HALF, {}, "flash_attn"),
        (ALL - {"flash_attn"}, (9, 0), HALF, {}, "varlen"),
        ({"triton"}, (9, 0), HALF, {}, "flex"),
        (set(), (9, 0), HALF, {}, "loop"),
        (ALL, (7, 5), HALF, {}, "loop"),
        (ALL, (9, 0), SINGLE, {}, "flex"),
        (ALL - {"triton"}, (9, 0), SINGLE, {}, "loop"),
        (ALL, (9, 0), DOUBLE, {}, "loop"),
        (ALL, (9, 0), HALF, {"dropout_p": 0.1}, "flash_attn"),
        (ALL - {"flash_attn"}, (9, 0), HALF, {"dropout_p": 0.1}, "loop"),
        (ALL - {"flash_attn"}, (9, 0), HALF, {"softcap": 30.0}, "flex"),
        (ALL - {"flash_attn"}, (9, 0), HALF, {"alibi_slopes": SLOPES}, "flex"),
        (ALL - {"flash_attn"}, (9, 0), HALF, {"window": 8}, "varlen" if varlen_knows_windows() else "flex"),
    ],
)
def test_the_choice_on_cuda(machine, installed, capability, dtype, options, chosen):
    machine(installed, capability)
    tensor = OnCuda(dtype)
    assert choice.choose(tensor, tensor, documents(**options)) == chosen  # pyright: ignore[reportArgumentType]


def test_unusual_heads_go_where_they_fit(machine):
    machine(ALL)
    for query, value in ((OnCuda(features=320), OnCuda(features=320)), (OnCuda(features=96), OnCuda())):
        assert choice.choose(query, value, documents()) == "flex"  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("backend", "options", "message"),
    [
        ("varlen", {"dropout_p": 0.1}, r"has no dropout \(dropout_p=0.1\)"),
        ("flex", {"dropout_p": 0.1}, r"has no dropout \(dropout_p=0.1\)"),
        ("varlen", {"softcap": 1.0}, "has no softcap"),
        ("varlen", {"alibi_slopes": SLOPES}, "has no softcap and no alibi_slopes"),
    ],
)
def test_what_a_kernel_lacks_is_refused_with_the_remedy(machine, backend, options, message):
    machine(ALL)
    reason = choice.refusal(backend, OnCuda(), OnCuda(), documents(**options))  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=message + '.*"loop" runs everywhere'):
        raise reason or AssertionError


def test_a_flash_attn_without_its_kernels_is_none(monkeypatch, tmp_path):
    """FlashAttention-4 alone is such a package; "auto" took it and raised ImportError."""
    (tmp_path / "flash_attn").mkdir()
    (tmp_path / "flash_attn" / "cute.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    choice._importable.cache_clear()
    try:
        import flash_attn  # pyright: ignore[reportMissingImports]

        assert not hasattr(flash_attn, "flash_attn_varlen_func")
        assert not choice.has_flash_attn()
        query: Any = OnCuda()
        assert choice.choose(query, query, documents()) != "flash_attn"
    finally:
        choice._importable.cache_clear()
        sys.modules.pop("flash_attn", None)


@pytest.mark.parametrize(("backend", "package"), [("flash_attn", "flash-attn"), ("flex", "triton")])
def test_a_missing_package_is_named(machine, backend, package):
    machine(set())
    reason = choice.refusal(backend, OnCuda(), OnCuda(), documents())  # pyright: ignore[reportArgumentType]
    with pytest.raises(MissingPackageError, match=f"pip install {package}"):
        raise reason or AssertionError


def alone(query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, **options) -> Tensor:
    """A kernel's stand-in, [tokens, heads, head_dim]: computed by the loop."""
    query, key, value = (x.transpose(0, 1)[None] for x in (query, key, value))
    return in_torch.loop(query, key, value, Documents(cu_seqlens=bounds, **options))[0].transpose(0, 1)


@pytest.mark.parametrize("version", ["2.10", "2.13"])
@pytest.mark.parametrize("window", [None, 4])
def test_torchs_varlen_kernel_is_called_as_its_version_asks(monkeypatch, version, window):
    """A stand-in with the version's arguments: shapes, order and options are right."""
    given = {}

    def old(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False):
        given.update(is_causal=is_causal)
        assert (max_q, max_k) == (24, 24)
        return alone(query, key, value, cu_seq_q)

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
        given.update(scale=scale, window_size=window_size, enable_gqa=enable_gqa)
        assert (max_q, max_k) == (24, 24)
        return alone(query, key, value, cu_seq_q, scale=scale, window=window)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", old if version == "2.10" else new)
    if version == "2.10" and window:
        assert not kernels.varlen_knows_windows()
        return
    query, key, value = inputs(key_heads=2, dtype=torch.float64)
    expected = document_by_document(query, key, value, scale=0.7, window=window)
    computed = kernels.varlen(query, key, value, documents(scale=0.7, window=window))
    torch.testing.assert_close(computed.double(), expected)
    if version == "2.10":
        assert given == {"is_causal": True}
    else:
        assert given == {"scale": 0.7, "window_size": (3 if window else -1, 0), "enable_gqa": True}


@pytest.mark.parametrize("is_deterministic", [False, True])
@pytest.mark.parametrize("causal", [True, False])
def test_the_flash_attn_package_is_called_with_its_own_names(monkeypatch, causal, is_deterministic):
    given = {}

    def kernel(query, key, value, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, **options):
        given.update(options)
        assert cu_seqlens_q is cu_seqlens_k
        assert (max_seqlen_q, max_seqlen_k) == (24, 24)
        return alone(
            query, key, value, cu_seqlens_q, causal=causal, window=4, softcap=3.0, alibi_slopes=SLOPES
        )

    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(flash_attn_varlen_func=kernel))
    query, key, value = inputs(key_heads=2, dtype=torch.float64)
    options = {"causal": causal, "window": 4, "softcap": 3.0, "alibi_slopes": SLOPES}
    torch.use_deterministic_algorithms(is_deterministic)
    try:
        computed = kernels.flash_attn(query, key, value, documents(**options, dropout_p=0.1))
    finally:
        torch.use_deterministic_algorithms(False)
    torch.testing.assert_close(computed, document_by_document(query, key, value, **options))
    assert given.pop("alibi_slopes") is SLOPES
    assert given == {
        "causal": causal,
        "softmax_scale": None,
        "dropout_p": 0.1,
        "window_size": (3, 0 if causal else 3),
        "softcap": 3.0,
        **({"deterministic": True} if is_deterministic else {}),
    }


@pytest.mark.parametrize("options", [{}, {"window": 4}, {"softcap": 2.0}], ids=str)
def test_flex_is_the_loop_while_operators_are_observed(monkeypatch, options):
    """torch skips what it is to compile under a dispatch mode, and all scores were in memory."""
    calls = []

    def compiled(signature: Any) -> Any:
        calls.append("flex")
        return flex_attention

    monkeypatch.setattr(flex, "_attention", compiled)
    query, key, value = inputs(key_heads=2)
    with ByteMeter():
        computed = flex.flex(query, key, value, documents(**options))
        computed.sum().backward()
    assert not calls
    expected = document_by_document(query, key, value, **options)
    torch.testing.assert_close(computed, expected, check_dtype=False)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    "options", [{}, {"window": 4}, {"softcap": 2.0}, {"alibi_slopes": SLOPES}, {"scale": 0.3}], ids=str
)
def test_flex_masks_and_changes_scores_as_the_formula_does(monkeypatch, causal, options):
    """FlexAttention uncompiled, which runs forward on the CPU."""
    monkeypatch.setattr(flex, "_attention", lambda signature: flex_attention)
    query, key, value = (x.detach() for x in inputs(key_heads=2))
    computed = flex.flex(query, key, value, documents(causal=causal, **options))
    expected = document_by_document(query, key, value, causal=causal, **options)
    torch.testing.assert_close(computed.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
@NEEDS_COMPILER
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # torch's compiler uses torch.jit itself
@pytest.mark.parametrize("causal", [True, False])
def test_flex_compiled_gives_the_same(causal):
    """Forward, and in C++ where a GPU has Triton: the same masks and score changes are compiled."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, heads, 256, 64, generator=generator) for heads in (4, 2, 2))
    bounds = torch.tensor([0, 50, 100, 150, 220, 230, 256, 512], dtype=torch.int32)
    asked: tuple[dict[str, Any], ...] = ({}, {"window": 30}, {"softcap": 2.0}, {"alibi_slopes": SLOPES})
    for options in asked:
        given = Documents(cu_seqlens=bounds, causal=causal, **options)
        torch.testing.assert_close(
            flex.flex(query, key, value, given), in_torch.loop(query, key, value, given)
        )


@pytest.mark.slow
@NEEDS_COMPILER
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
def test_flex_stays_compiled_for_more_kinds_of_layers_than_torch_compiles_a_function_for():
    """Beyond torch's limit it would run uncompiled, with all scores in memory; torch's warning of that is an error."""
    generator = torch.Generator().manual_seed(0)
    bounds = torch.tensor([0, 100, 256], dtype=torch.int32)
    with torch._dynamo.config.patch(recompile_limit=1):
        asked: tuple[tuple[int, dict[str, Any]], ...] = ((16, {}), (32, {}), (16, {"softcap": 2.0}))
        for width, options in asked:
            query, key, value = (torch.randn(1, 2, 256, width, generator=generator) for _ in range(3))
            given = Documents(cu_seqlens=bounds, **options)
            for _ in range(2):
                computed = flex.flex(query, key, value, given)
            torch.testing.assert_close(computed, in_torch.loop(query, key, value, given))


def test_each_kind_of_layer_has_compiled_code_of_its_own(monkeypatch):
    compiled, compiles = [], torch.compile

    def compile_(function: Any, **options: Any) -> Any:
        if options != {"dynamic": True}:  # FlexAttention's own
            return compiles(function, **options)
        compiled.append(function)
        return flex_attention

    monkeypatch.setattr(torch, "compile", compile_)
    flex._attention.cache_clear()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # this is about what would be compiled
            asked: list[tuple[int, dict[str, Any]]] = [
                (16, {}),
                (32, {}),
                (16, {"softcap": 2.0}),
                (16, {}),
                (32, {}),
            ]
            for width, options in asked:
                query, key, value = (torch.randn(1, 2, 8, width) for _ in range(3))
                flex.flex(query, key, value, Documents(cu_seqlens=torch.tensor([0, 3, 8]), **options))
    finally:
        flex._attention.cache_clear()
    assert len(compiled) == 3
    assert len({id(function.__code__) for function in compiled}) == 3


def test_flex_makes_its_mask_once_for_all_layers():
    query = torch.randn(2, 4, 24, 8)
    given = documents()
    mask = flex._block_mask(given, query)
    assert flex._block_mask(given, query) is mask
    other = Documents(cu_seqlens=given.cu_seqlens, window=3)
    assert flex._block_mask(other, query) is not mask
    given.cu_seqlens[1] = 4
    assert flex._block_mask(other, query) is not flex._block_mask(given, query)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 1, 100, 129, 300, 2000])
@pytest.mark.parametrize(
    "ends", [(40, 200, 512, 650, 1300), (1536,), (128, 384, 384, 1000), (1, 2, 700, 1025)], ids=str
)
def test_the_blocks_of_a_mask_are_those_that_torch_finds_by_all_pairs(ends, window, causal):
    """The oracle is `create_block_mask`, which looks at each pair of tokens."""
    given = Documents(cu_seqlens=torch.tensor((0, *ends), dtype=torch.int32), window=window, causal=causal)
    mask = flex._block_mask(given, torch.empty(1, 1, ends[-1], 1))
    expected = create_block_mask(mask.mask_mod, None, None, ends[-1], ends[-1], device="cpu")
    assert mask.BLOCK_SIZE == (128, 128)
    # torch's CUDA kernels find a row of the table of whole blocks by the stride of the other one.
    assert mask.kv_indices.stride() == mask.full_kv_indices.stride()
    assert mask.q_indices.stride() == mask.full_q_indices.stride()
    for name in ("kv", "full_kv", "q", "full_q"):
        counts, places = (getattr(mask, f"{name}_{what}")[0, 0] for what in ("num_blocks", "indices"))
        found = [row[:count].tolist() for row, count in zip(places, counts.tolist(), strict=True)]
        counts, places = (getattr(expected, f"{name}_{what}")[0, 0] for what in ("num_blocks", "indices"))
        assert found == [row[:count].tolist() for row, count in zip(places, counts.tolist(), strict=True)], (
            name
        )


@pytest.mark.parametrize(
    "ends", [(65_536,), (40_961, 65_536), tuple(range(701, 65_536, 700)), (1, 65_536)], ids=len
)
@pytest.mark.parametrize("window", [None, 4096])
def test_a_mask_of_64k_tokens_takes_a_mib_at_the_most(ends, window):
    bounds = torch.tensor((0, *ends) if ends[-1] == 65_536 else (0, *ends, 65_536), dtype=torch.int32)
    query = torch.empty(1, 1, 65_536, 1)
    with ByteMeter() as meter:
        mask = flex._block_mask(Documents(cu_seqlens=bounds, window=window), query)
        assert meter.live_bytes <= 2**20
    assert meter.peak_bytes <= 3 * 2**20  # of the numbers of tokens, while they are made
    held = [
        getattr(mask, f"{name}_{what}")
        for name in ("kv", "full_kv", "q", "full_q")
        for what in ("num_blocks", "indices")
    ]
    # On a CPU rows run on into the next ones.
    assert sum(tensor.untyped_storage().nbytes() for tensor in held) <= 5 * 2**17


def test_the_longest_document_is_asked_for_once_a_batch(monkeypatch):
    """Each time would wait for the device: once a layer."""
    given, asked, diff = documents(), [], torch.Tensor.diff
    monkeypatch.setattr(
        torch.Tensor, "diff", lambda *args, **kwargs: asked.append(1) or diff(*args, **kwargs)
    )
    longest = [Documents(cu_seqlens=given.cu_seqlens).longest() for _ in range(8)]
    assert len(set(longest)) == 1
    assert len(asked) == 1
    given.cu_seqlens[-1] += 1  # another batch in the same tensor
    assert given.longest() == longest[0] + 1
    assert len(asked) == 2


def test_the_loop_reads_bounds_from_the_device_once_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers, and a checkpointed layer that runs again in the backward, would each wait for the device."""
    bounds, read = torch.tensor(BOUNDS, dtype=torch.int32), []
    query, key, value = inputs()
    query.requires_grad_()
    for name in ("tolist", "item", "__int__", "__bool__"):
        stock = getattr(Tensor, name)
        monkeypatch.setattr(Tensor, name, lambda one, stock=stock: read.append(one.dtype) or stock(one))
    hidden = query
    for _ in range(3):
        hidden = checkpoint(packed_attention, hidden, key, value, bounds, backend="loop", use_reentrant=False)
    hidden.sum().backward()
    assert read.count(torch.int32) == 1
    bounds += 0  # another batch in the same tensor
    packed_attention(query, key, value, bounds, backend="loop")
    assert read.count(torch.int32) == 2


def test_in_inference_mode_bounds_that_are_written_to_are_read_again():
    """Their tensors count no versions, which asking for one says by an error."""
    with torch.inference_mode():
        given = documents()
        longest, query = given.longest(), torch.randn(2, 4, 24, 8)
        assert flex._block_mask(given, query) is not flex._block_mask(given, query)
        given.cu_seqlens[-1] += 1
        assert given.longest() == longest + 1


def test_bounds_that_do_not_cover_the_batch_make_no_mask():
    """A kernel would read what is not there."""
    short = Documents(cu_seqlens=torch.tensor([0, 10], dtype=torch.int32))
    with pytest.raises(ValueError, match=r"runs from 0 to 10; it runs from 0 to batch \* tokens = 48"):
        flex._block_mask(short, torch.randn(2, 4, 24, 8))
