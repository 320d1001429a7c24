"""What operators are known to return is what torch's fake kernels return: shapes, strides, memory and aliases."""

import copy
from itertools import islice

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_memkit.prediction.fakes import Fakes

aten = torch.ops.aten


class Through(TorchDispatchMode):
    """Runs operators by what is known of them."""

    def __init__(self) -> None:
        super().__init__()
        self.fakes = Fakes()
        self.results = self.fakes.results

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return self.results.run(func, args, kwargs or {})

    def outcome(self, call, reals):
        """What `call` returns for twins of these tensors, and the twins after it."""
        twins = twins_of(self.fakes.mode, reals)
        with self.fakes.mode, self:
            return call(twins), twins


def twins_of(mode: FakeTensorMode, reals):
    """Fake tensors of their own, that are views as the real ones are."""
    return tree_map_only(Tensor, mode.from_tensor, copy.deepcopy(reals))


def traits(values) -> list[object]:
    """What a prediction may see of tensors: their layout, and which of them share memory."""
    seen: list[object] = []
    storages: dict[int, int] = {}
    for one in tree_leaves(values):
        if not isinstance(one, Tensor):
            seen.append((type(one), one if isinstance(one, (int, float, complex, str)) else None))
            continue
        number = storages.setdefault(one.untyped_storage()._cdata, len(storages))
        seen.append((
            number, one.dtype, tuple(one.shape), one.stride(), one.storage_offset(), one.untyped_storage().nbytes(),
            one.requires_grad, one.device, one.is_conj(), one.is_neg(), torch._C._dispatch_key_set(one),
            {name: value for name, value in vars(one).items() if name != "fake_mode"},
        ))  # fmt: skip
    return seen


def as_torch(call, reals):
    """The same without what is known."""
    mode = FakeTensorMode()
    twins = twins_of(mode, reals)
    with mode:
        return traits([call(twins), twins])


def check(call, reals, *, through: Through | None = None) -> Through:
    """Compare the first and the second run of a call with torch's own."""
    through = through or Through()
    expected = as_torch(call, reals)
    for turn in ("learned", "known"):
        out, twins = through.outcome(call, reals)
        assert traits([out, twins]) == expected, turn
    return through


def x(*shape, dtype=torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


CALLS = {
    "product": (lambda t: t[0] @ t[1], [x(3, 4), x(4, 5)]),
    "of integers and floats": (lambda t: t[0] * 2.5, [x(3, dtype=torch.int64)]),
    "with an integer": (lambda t: t[0] * 2, [x(3, dtype=torch.int64)]),
    "view": (lambda t: t[0].view(2, 6), [x(3, 4)]),
    "a view of a view": (lambda t: t[0][1:].transpose(0, 1)[1], [x(3, 4)]),
    "slices": (lambda t: t[0].split(2), [x(5, 4)]),
    "an unsafe view": (lambda t: aten._unsafe_view(t[0], [4, 3]), [x(3, 4)]),
    "expanded": (lambda t: t[0].expand(7, 4), [x(1, 4)]),
    "in place": (lambda t: t[0].add_(t[1]), [x(3, 4), x(4)]),
    "in place on a view": (lambda t: t[0][1].mul_(2), [x(3, 4)]),
    "into out=": (lambda t: torch.add(t[0], t[1], out=t[2]), [x(3), x(3), x(3)]),
    "into out= of another size": (lambda t: torch.add(t[0], t[1], out=t[2]), [x(3), x(3), x(0)]),
    "shape in place": (lambda t: t[0].unsqueeze_(0), [x(3, 4)]),
    "grown in place": (lambda t: t[0].resize_(5, 5), [x(3, 4)]),
    "two results": (lambda t: torch.var_mean(t[0], dim=1), [x(3, 4)]),
    "results of which one is none": (
        lambda t: aten.native_layer_norm_backward(
            t[0], t[0], [4], t[1], t[1], t[2], None, [True, True, False]
        ),
        [x(3, 4), x(3, 1), x(4)],
    ),
    "lists": (lambda t: torch._foreach_mul(t, 2.0), [x(3), x(4, 4)]),
    "lists in place": (lambda t: torch._foreach_add_(t, 1.0), [x(3), x(4, 4)]),
    "another dtype": (lambda t: t[0].to(torch.bfloat16), [x(3, 4).t()]),
    "other memory format": (
        lambda t: t[0].contiguous(memory_format=torch.channels_last),
        [x(2, 3, 4, 5)],
    ),
    "conjugate": (lambda t: (t[0].conj(), t[0].conj().resolve_conj()), [x(3, dtype=torch.complex64)]),
    "imaginary part": (lambda t: t[0].conj().imag, [x(3, dtype=torch.complex64)]),
    "rows by index": (lambda t: t[0][t[1]], [x(5, 4), x(2, 2, dtype=torch.int64)]),
    "made": (lambda t: (torch.ones(3), torch.arange(4), torch.full((2,), 1.0)), []),
    "nothing": (lambda t: t[0] @ t[1], [x(0, 4), x(4, 5)]),
    "a number": (lambda t: t[0].sum(), [x(3)]),
    "a sum of one value": (lambda t: t[0].sum(dim=0, keepdim=True), [x(1)]),
}


IMAGINARY = x(3, dtype=torch.complex64)


@pytest.mark.parametrize("name", CALLS)
def test_the_second_run_returns_what_torch_returns(name):
    check(*CALLS[name])


def test_what_looks_alike_is_not_run_again():
    through = check(*CALLS["product"])
    before = through.results.misses
    check(*CALLS["product"], through=through)
    assert through.results.misses == before == 1


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((lambda t: t[0] * 2, [x(3, dtype=torch.int64)]), (lambda t: t[0] * 2.0, [x(3, dtype=torch.int64)])),
        ((lambda t: t[0] + 1, [x(3)]), (lambda t: t[0] + 1, [x(3, dtype=torch.bfloat16)])),
        ((lambda t: t[0] + 1, [x(3, 4)]), (lambda t: t[0] + 1, [x(4, 3).t()])),
        ((lambda t: t[0].view(-1), [x(3, 4)]), (lambda t: t[0].view(-1), [x(2, 3, 4)[1]])),
        ((lambda t: t[0].sum(0), [x(3, 4)]), (lambda t: t[0].sum(0, dtype=torch.float64), [x(3, 4)])),
        ((lambda t: t[0].conj() * 1, [IMAGINARY]), (lambda t: t[0] * 1, [IMAGINARY])),
    ],
    ids=["type of a number", "dtype", "strides", "offset", "argument by name", "conjugate"],
)  # fmt: skip
def test_what_looks_almost_alike_is_told_apart(first, second):
    check(*second, through=check(*first))


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_an_address_may_be_asked_for_as_of_any_fake_tensor():
    """Optimizers of other libraries count states by their addresses, which are 0."""
    through = Through()
    for _ in range(3):
        out, _ = through.outcome(lambda t: [t[0] @ t[1], t[0][1:]], [x(3, 4), x(4, 5)])
        assert [one.data_ptr() for one in out] == [0, 16]


def test_a_default_dtype_counts(monkeypatch):
    through = check(lambda t: torch.ones(3), [])
    torch.set_default_dtype(torch.float64)
    try:
        check(lambda t: torch.ones(3), [], through=through)
    finally:
        torch.set_default_dtype(torch.float32)


def test_an_error_is_raised_each_time():
    through = Through()
    for _ in range(3):
        with pytest.raises(RuntimeError, match="size|shape"):
            through.outcome(lambda t: t[0].view(5), [x(3, 4)])


def test_gradients_flow_as_without():
    """Autograd marks what an operator returns: views of leaves, versions, and who needs a gradient."""

    def step(t) -> list[object]:
        weight = t[0].requires_grad_()
        hidden = torch.nn.functional.gelu(t[1] @ weight.t())
        before = hidden._version
        hidden = hidden.view(2, -1, hidden.shape[-1]).add_(1)
        hidden.sum().backward()
        return [weight.grad, hidden._version - before, hidden._is_view(), hidden.requires_grad]

    check(step, [x(5, 4), x(6, 4)])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_all_of_torchs_operators():
    """Samples of torch's own tests, for each of its operators in float32."""
    from torch.testing._internal.common_methods_invocations import op_db

    compared, unlike, through = 0, [], Through()
    for operator in op_db:
        if torch.float32 not in operator.supported_dtypes("cpu"):
            continue
        for sample in islice(operator.sample_inputs("cpu", torch.float32, requires_grad=False), 4):
            call = sample.input, sample.args, sample.kwargs

            def run(t, operator=operator):
                given, args, kwargs = t
                return operator.op(given, *args, **kwargs)

            try:
                as_torch(run, call)
            except Exception:  # torch has no fake kernel for it, or it asks for values
                continue
            compared += 1
            try:
                check(run, call, through=through)
            except Exception as error:
                unlike.append(f"{operator.name}: {str(error)[:300]}")
    assert not unlike
    assert compared > 1500
