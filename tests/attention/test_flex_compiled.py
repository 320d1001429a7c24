"""When FlexAttention is compiled and when the loop takes its place: uncompiled it would keep all scores in memory."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import flex_attention as theirs

from lightning_memkit import checkpoint_modules
from lightning_memkit.activations.recorded import Operator
from lightning_memkit.activations.tape import Tape
from lightning_memkit.attention import flex, in_torch
from lightning_memkit.attention.documents import Documents
from tests.attention.fused import GRAPHS, LENGTHS, fused_only

ROWS, LENGTH, WIDTH, HEADS = 2, 24, 16, 2

__all__ = ["fused_only"]

pytestmark = pytest.mark.usefixtures("fused_only")


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[CompileCounterWithBackend]:
    """What is compiled, by torch's own rules of when; its code is run as it is, so that no compiler is needed."""
    counter, compiles = CompileCounterWithBackend("eager"), torch.compile

    def compile_(function: Any, **options: Any) -> Any:
        return compiles(function, **options, backend=counter)

    monkeypatch.setattr(torch, "compile", compile_)
    flex._attention.cache_clear()
    torch._dynamo.reset()
    yield counter
    flex._attention.cache_clear()
    torch._dynamo.reset()


def documents(length: int, rows: int = 1) -> Documents:
    """Two in each row."""
    bounds = [0, *(row * length + end for row in range(rows) for end in (11, length))]
    return Documents(cu_seqlens=torch.tensor(bounds, dtype=torch.int32))


@pytest.mark.long
def test_a_kind_of_layer_is_compiled_for_all_lengths_and_kinds_share_no_limit(
    graphs: CompileCounterWithBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond its limit torch would run a function uncompiled. The tables are those of a card, as wide as they are."""
    monkeypatch.setattr(flex, "_as_wide_as_long", torch.from_numpy)
    generator = torch.Generator().manual_seed(0)
    with torch._dynamo.config.patch(recompile_limit=GRAPHS):
        for kind in range(3):
            for bounds in LENGTHS:
                given = Documents(cu_seqlens=torch.tensor(bounds, dtype=torch.int32))
                query, key, value = (
                    torch.randn(1, 4, bounds[-1], 8 + 8 * kind, generator=generator) for _ in range(3)
                )
                found = flex.flex(query, key, value, given)
                torch.testing.assert_close(found, in_torch.loop(query, key, value, given))
            assert graphs.frame_count == GRAPHS * (kind + 1)


def test_so_few_tokens_that_cuda_compiles_each_number_of_them_take_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As an H200 showed: torch's kernel for fewer than 128 queries was compiled for 64 of them, and for 100 again."""
    calls: list[int] = []
    monkeypatch.setattr(flex, "loop", lambda query, *_: calls.append(query.size(2)))
    with FakeTensorMode():
        few = torch.empty(1, HEADS, 127, 16, device="cuda", dtype=torch.bfloat16)
        flex.flex(few, few, few, documents(127))
        rows = torch.empty(2, HEADS, 64, 16, device="cuda", dtype=torch.bfloat16)
        assert not flex._is_short(rows)  # they are flattened before the kernel
    assert calls == [127]


class Mixing(nn.Module):
    """A block of attention over packed rows, by FlexAttention."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, given: Documents) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = flex.flex(query, key, value, given)
        return x + self.out(mixed.transpose(1, 2).flatten(2)).tanh()


class Stacked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Mixing() for _ in range(3))

    def forward(self, x: Tensor, given: Documents) -> Tensor:
        for block in self.blocks:
            x = block(x, given)
        return x.square().sum()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which of the two ran; what is compiled has no backward on the CPU, so that the loop stands for it."""
    called: list[str] = []

    def looped(query: Tensor, key: Tensor, value: Tensor, given: Documents) -> Tensor:
        called.append("loop")
        return in_torch.loop(query, key, value, given)

    def compiled(signature: Any) -> Any:
        def attend(query: Tensor, key: Tensor, value: Tensor, **_: Any) -> Tensor:
            assert not torch._C._len_torch_dispatch_stack()  # there torch compiles nothing
            called.append("flex")
            q, k, v = (x[0].unflatten(1, (ROWS, LENGTH)).transpose(0, 1) for x in (query, key, value))
            return in_torch.loop(q, k, v, documents(LENGTH, ROWS)).transpose(0, 1).flatten(1, 2)[None]

        return attend

    monkeypatch.setattr(flex, "loop", looped)
    monkeypatch.setattr(flex, "_attention", compiled)
    return called


def gradients(model: nn.Module, x: Tensor, given: Documents) -> list[Tensor]:
    model.zero_grad()
    model(x, given).backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize(
    ("policy", "ran"),
    [
        ("full", ["flex", "flex"]),  # the backward's, too: no operator is recorded
        ("selective", ["loop"]),  # which is recorded, and run again operator by operator
        ("selective:attention", ["loop"]),
        ("budget:0.1", ["loop"]),  # too little for any block to be left as it is
    ],
)
@pytest.mark.filterwarnings("ignore::lightning_memkit.NoEffectWarning")
@pytest.mark.filterwarnings("ignore:The budget of")
def test_recorded_blocks_run_the_loop_and_recomputed_ones_what_is_compiled(
    calls: list[str], policy: str, ran: list[str]
) -> None:
    torch.manual_seed(0)
    model, given = Stacked(), documents(LENGTH, ROWS)
    x = torch.randn(ROWS, LENGTH, WIDTH)
    plain = gradients(model, x, given)
    assert calls == 3 * ["flex"]
    undo = checkpoint_modules(model, policy, blocks=["Mixing"])
    for _ in range(2):
        calls.clear()
        found = gradients(model, x, given)
        assert calls == 3 * ran
        for ours, theirs_ in zip(found, plain, strict=True):
            torch.testing.assert_close(ours, theirs_)
    undo()


def test_under_a_tape_it_is_the_loop(calls: list[str]) -> None:
    seen: list[str] = []

    def keep(operator: Operator) -> bool:
        seen.append(operator.kind.name)
        return False

    query, key, value = (torch.randn(ROWS, HEADS, LENGTH, 8, requires_grad=True) for _ in range(3))
    given = documents(LENGTH, ROWS)
    tape = Tape(keep)
    out = tape.record(lambda: flex.flex(query, key, value, given), [query, key, value])
    tape.finish([out])
    assert calls == ["loop"]
    assert not any("flex" in name for name in seen)
    out.sum().backward()
    assert calls == ["loop"]
    expected = in_torch.loop(query, key, value, given)
    torch.testing.assert_close(out, expected)
    ours = query.grad
    torch.testing.assert_close(ours, torch.autograd.grad(expected.sum(), query)[0])


def test_the_guard_of_these_tests_sees_what_is_not_compiled() -> None:
    query, key, value = (torch.randn(1, 2, 16, 16) for _ in range(3))
    with pytest.raises(AssertionError, match="without torch.compile"):
        theirs.flex_attention(query, key, value)
