"""linear_cross_entropy against float64: every option, every dtype; counted bytes and products; what is refused."""

# pyright: reportOptionalMemberAccess=false, reportArgumentType=false
import itertools
import random

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from lightning_memkit.loss import backends, linear_cross_entropy
from lightning_memkit.memory.meter import ByteMeter

VOCABULARY, FEATURES = 301, 16
# Relative to the norm; gradients and values of the plain computation in these dtypes are as far off.
TOLERANCE = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}
OPTIONS = [
    {"label_smoothing": smoothing, "z_loss": z_loss, "softcap": softcap, "scale": scale}
    for smoothing, z_loss, softcap, scale in itertools.product((0, 0.1), (0, 1e-2), (None, 2.0), (1, 0.5))
]
CASES = list(itertools.product(("mean", "sum", "none"), (None, 6000, 1), (False, True), (True, False)))


def definition(hidden, weight, labels, bias, *, reduction, label_smoothing, z_loss, softcap, scale) -> Tensor:
    """The loss by torch's own functions, from whole logits."""
    logits = F.linear(hidden, weight, bias).flatten(0, -2) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    flat = labels.flatten()
    losses = F.cross_entropy(logits, flat, reduction="none", label_smoothing=label_smoothing)
    losses = losses + z_loss * logits.logsumexp(1).square() * (flat != -100)
    if reduction == "none":
        return losses.view(labels.shape)
    return losses.sum() / ((flat != -100).sum() if reduction == "mean" else 1)


def problem(dtype=torch.float32, bias=False, ignored=4):
    hidden = torch.randn(3, 11, FEATURES).to(dtype).requires_grad_()
    weight = torch.randn(VOCABULARY, FEATURES).to(dtype).requires_grad_()
    labels = torch.randint(VOCABULARY, (3, 11))
    labels[0, :ignored] = -100
    return hidden, weight, labels, torch.randn(VOCABULARY).to(dtype).requires_grad_() if bias else None


def gradients(loss, tensors, factor=None):
    given = [tensor for tensor in tensors if tensor is not None]
    return torch.autograd.grad(loss, given, factor)


def distance(value, truth):
    value, truth = value.detach(), truth.detach()
    return float((value.double() - truth).norm() / truth.norm())


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_value_and_gradients_are_those_of_the_definition_in_float64(dtype, options):
    for reduction, chunk_bytes, bias, skips in random.Random(str(options)).sample(CASES, 8):
        hidden, weight, labels, offset = problem(dtype, bias)
        factor = torch.randn(3, 11) if reduction == "none" else torch.tensor(0.7)
        given = {"bias": offset, "chunk_bytes": chunk_bytes, "skip_ignored": skips, **options}
        ours = linear_cross_entropy(hidden, weight, labels, reduction=reduction, **given)
        exact = [
            None if x is None else x.detach().double().requires_grad_() for x in (hidden, weight, offset)
        ]
        truth = definition(exact[0], exact[1], labels, exact[2], reduction=reduction, **options)
        assert ours.dtype is (torch.float64 if dtype is torch.float64 else torch.float32)
        assert distance(ours, truth) < TOLERANCE[dtype]
        found = gradients(ours, (hidden, weight, offset), factor.to(ours.dtype))
        for value, true in zip(found, gradients(truth, exact, factor.double()), strict=True):
            assert value.dtype is dtype
            assert distance(value, true) < TOLERANCE[dtype]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_all_cases_with_all_options(case):
    reduction, chunk_bytes, bias, skips = case
    for options in OPTIONS:
        hidden, weight, labels, offset = problem(torch.float64, bias)
        given = {"bias": offset, "chunk_bytes": chunk_bytes, "skip_ignored": skips, **options}
        ours = linear_cross_entropy(hidden, weight, labels, reduction=reduction, **given)
        truth = definition(hidden, weight, labels, offset, reduction=reduction, **options)
        factor = torch.randn(3, 11, dtype=torch.float64) if reduction == "none" else None
        torch.testing.assert_close(ours, truth)
        tensors = (hidden, weight, offset)
        for value, true in zip(
            gradients(ours, tensors, factor), gradients(truth, tensors, factor), strict=True
        ):
            torch.testing.assert_close(value, true)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_gradcheck(reduction):
    labels = torch.tensor([1, -100, 3, 8, 0])
    tensors = [torch.randn(*shape, dtype=torch.float64).requires_grad_() for shape in ((5, 4), (9, 4), (9,))]

    def loss(hidden, weight, bias):
        options = {"label_smoothing": 0.1, "z_loss": 0.1, "softcap": 3.0, "chunk_bytes": 300}
        return linear_cross_entropy(hidden, weight, labels, bias=bias, reduction=reduction, **options)

    assert torch.autograd.gradcheck(loss, tensors)


def test_bfloat16_is_no_worse_than_the_plain_computation_in_many_chunks():
    torch.manual_seed(1)
    hidden = torch.randn(512, 64).bfloat16().requires_grad_()
    weight = (torch.randn(1000, 64) / 8).bfloat16().requires_grad_()
    labels = torch.randint(1000, (512,))
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    truth = gradients(F.cross_entropy(F.linear(*exact), labels), exact)
    plain = gradients(F.cross_entropy(F.linear(hidden, weight).float(), labels), (hidden, weight))
    loss = linear_cross_entropy(hidden, weight, labels, chunk_bytes=16 * 6 * 1000)
    for ours, usual, true in zip(gradients(loss, (hidden, weight)), plain, truth, strict=True):
        assert distance(ours, true) < 1.001 * distance(usual, true)


def test_float16_gradients_survive_a_scaled_loss():
    """A gradient of 1e-8 a logit is zero in float16 unless the scaler's factor comes before the rounding."""
    hidden, weight, labels, _ = problem(torch.float16)
    scaled = 2.0**14 * linear_cross_entropy(hidden, weight, labels, count=2.0**22, chunk_bytes=6000)
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    truth = (
        2.0**14 * F.cross_entropy(F.linear(*exact).flatten(0, 1), labels.flatten(), reduction="sum") / 2.0**22
    )
    for ours, true in zip(gradients(scaled, (hidden, weight)), gradients(truth, exact), strict=True):
        assert distance(ours, true) < TOLERANCE[torch.float16]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_memory_holds_a_chunk_and_the_gradients(dtype):
    tokens, vocabulary, features = 512, 4096, 64
    hidden = torch.randn(tokens, features).to(dtype).requires_grad_()
    weight = torch.randn(vocabulary, features).to(dtype).requires_grad_()
    labels = torch.randint(vocabulary, (tokens,))
    chunk_bytes = 2**20
    with ByteMeter() as meter:
        linear_cross_entropy(hidden, weight, labels, chunk_bytes=chunk_bytes).backward()
    must = hidden.nbytes + weight.nbytes
    columns = tokens * 256 * 6 if dtype is torch.bfloat16 else 0  # no fewer than 256 columns at a time
    assert meter.peak_bytes < must + max(chunk_bytes, columns) + 100 * tokens
    assert meter.peak_bytes < tokens * vocabulary * 4 / 3


def products(run):
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops() / (2 * VOCABULARY * FEATURES)


@pytest.mark.parametrize(
    ("dtype", "frozen", "count"),
    [
        (torch.float32, False, 3),
        (torch.float32, True, 2),
        (torch.bfloat16, False, 4),
        (torch.bfloat16, True, 2),
    ],
    ids=str,
)
def test_ignored_tokens_and_frozen_weights_cost_no_product(dtype, frozen, count):
    hidden, weight, labels, _ = problem(dtype, ignored=11)
    weight.requires_grad_(not frozen)
    chunk = {"chunk_bytes": 8 * 4 * VOCABULARY}
    assert products(lambda: linear_cross_entropy(hidden, weight, labels, **chunk).backward()) == count * 22


def test_without_gradients_it_is_one_product():
    hidden, weight, labels, _ = problem()
    with torch.no_grad():
        assert products(lambda: linear_cross_entropy(hidden, weight, labels)) == 29
    loss = products(lambda: linear_cross_entropy(hidden.detach(), weight.detach(), labels))
    assert loss == 29


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_a_second_backward_is_right(reduction):
    hidden, weight, labels, _ = problem()
    loss = linear_cross_entropy(hidden, weight, labels, reduction=reduction)
    factor = torch.full(loss.shape, 3.0)
    loss.backward(factor, retain_graph=True)
    first = hidden.grad.clone(), weight.grad.clone()
    loss.backward(factor)
    torch.testing.assert_close(hidden.grad, 2 * first[0])
    torch.testing.assert_close(weight.grad, 2 * first[1])


def test_a_second_backward_after_the_weight_changed_is_refused():
    hidden, weight, labels, _ = problem()
    loss = linear_cross_entropy(hidden, weight, labels)
    loss.backward(retain_graph=True)
    with torch.no_grad():
        weight += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_second_derivative_is_refused():
    hidden, weight, labels, _ = problem()
    loss = linear_cross_entropy(hidden * 2, weight, labels)
    with pytest.raises(RuntimeError, match="has no second derivative"):
        torch.autograd.grad(loss, hidden, create_graph=True)


def test_shift_is_that_of_causal_models():
    hidden, weight, labels, _ = problem(torch.float64)
    ours = linear_cross_entropy(hidden, weight, labels, shift=True)
    logits = F.linear(hidden, weight)[:, :-1]
    truth = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
    torch.testing.assert_close(ours, truth)
    by_token = linear_cross_entropy(hidden, weight, labels, shift=True, reduction="none")
    assert by_token.shape == labels.shape
    assert (by_token[:, -1] == 0).all()


def test_parts_with_the_whole_count_add_up_to_the_whole():
    hidden, weight, labels, _ = problem(torch.float64)
    whole = linear_cross_entropy(hidden, weight, labels)
    count = (labels != -100).sum()
    parts = [linear_cross_entropy(hidden[i], weight, labels[i], count=count) for i in range(3)]
    torch.testing.assert_close(sum(parts), whole)
    for part, true in zip(
        gradients(sum(parts), (hidden, weight)), gradients(whole, (hidden, weight)), strict=True
    ):
        torch.testing.assert_close(part, true)


@pytest.mark.parametrize("count", [6, torch.tensor(6), torch.tensor(6.0)])
def test_a_count_of_any_kind_leaves_float64_its_precision(count):
    hidden, weight, labels, _ = problem(torch.float64)
    ours = linear_cross_entropy(hidden, weight, labels, count=count)
    logits = F.linear(hidden, weight).flatten(0, -2)
    truth = F.cross_entropy(logits, labels.flatten(), reduction="sum") / 6
    assert ours.dtype is torch.float64
    found = gradients(ours, (hidden, weight))
    for gradient, true in zip(found, gradients(truth, (hidden, weight)), strict=True):
        torch.testing.assert_close(gradient, true, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("tokens", [4, 0])
def test_no_label_that_counts_gives_what_torch_gives(reduction, tokens):
    hidden = torch.randn(tokens, FEATURES).requires_grad_()
    weight = torch.randn(VOCABULARY, FEATURES).requires_grad_()
    labels = torch.full((tokens,), -100)
    ours = linear_cross_entropy(hidden, weight, labels, reduction=reduction)
    truth = F.cross_entropy(F.linear(hidden, weight), labels, reduction=reduction)
    torch.testing.assert_close(ours, truth, equal_nan=True)
    for gradient in gradients(ours, (hidden, weight), torch.ones_like(ours)):
        assert not gradient.any()


def test_under_autocast_it_is_as_right_as_the_plain_computation():
    hidden, weight, labels, bias = problem(bias=True)
    given = (hidden, weight, bias)
    with torch.autocast("cpu", torch.bfloat16):
        ours = linear_cross_entropy(hidden, weight, labels, bias=bias, chunk_bytes=6000)
        plain = F.cross_entropy(F.linear(hidden, weight, bias).flatten(0, 1), labels.flatten())
    exact = [x.detach().double().requires_grad_() for x in given]
    truth = F.cross_entropy(F.linear(*exact).flatten(0, 1), labels.flatten())
    assert distance(ours, truth) < 1.05 * distance(plain, truth) + 1e-6
    for value, usual, true in zip(
        gradients(ours, given), gradients(plain, given), gradients(truth, exact), strict=True
    ):
        assert value.dtype is torch.float32
        assert distance(value, true) < 1.05 * distance(usual, true)


def test_tied_weights_get_both_gradients():
    weight = torch.randn(VOCABULARY, FEATURES, dtype=torch.float64).requires_grad_()
    tokens = torch.randint(VOCABULARY, (7,))
    ours = linear_cross_entropy(F.embedding(tokens, weight), weight, tokens)
    truth = F.cross_entropy(F.linear(F.embedding(tokens, weight), weight), tokens)
    torch.testing.assert_close(gradients(ours, [weight]), gradients(truth, [weight]))


def test_inputs_may_be_strided_and_labels_int32():
    hidden, weight, labels, _ = problem()
    ours = linear_cross_entropy(hidden.transpose(0, 1), weight.t().contiguous().t(), labels.t().int())
    torch.testing.assert_close(ours, linear_cross_entropy(hidden, weight, labels))


def test_fake_tensors_pass_through():
    with FakeTensorMode():
        hidden = torch.randn(5, 8, requires_grad=True)
        weight = torch.randn(40, 8, requires_grad=True)
        labels = torch.zeros(5, dtype=torch.int64)
        linear_cross_entropy(hidden, weight, labels, label_smoothing=0.1, softcap=3.0).backward()
        assert weight.grad.shape == weight.shape


def test_the_next_forward_leaves_the_gradients_given_before_alone():
    hidden, weight, labels, _ = problem()
    first = linear_cross_entropy(hidden, weight, labels)
    second = linear_cross_entropy(hidden, weight, labels)
    first.backward()
    kept = weight.grad.clone()
    weight.grad = None
    second.backward()
    torch.testing.assert_close(weight.grad, kept)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"label_smoothing": 10}, ValueError, "for 10 % write 0.1"),
        ({"z_loss": -1}, ValueError, "write 0 or more"),
        ({"softcap": 0.0}, ValueError, "write a positive number"),
        ({"scale": 0.0}, ValueError, "leaves no logits"),
        ({"reduction": "average"}, ValueError, "choose one of"),
        ({"reduction": "sum", "count": 3}, ValueError, "only a mean is divided"),
        ({"count": 0}, ValueError, "one number above 0"),
        ({"count": float("nan")}, ValueError, "one number above 0"),
        ({"count": torch.tensor([1, 2])}, ValueError, "one number above 0"),
        (
            {"hidden": torch.zeros(FEATURES), "labels": torch.tensor(1), "shift": True},
            ValueError,
            "pass rows of tokens",
        ),
        ({"backend": "triton"}, ValueError, "choose one of"),
        ({"chunk_bytes": "64 bananas"}, ValueError, "is not a size"),
        ({"labels": torch.full((3, 11), VOCABULARY)}, IndexError, "Label 301 is out of bounds: .* 0 to 300"),
        ({"labels": torch.full((3, 11), -1)}, IndexError, "Label -1 is out of bounds"),
        ({"labels": torch.zeros(3, 10, dtype=torch.int64)}, ValueError, "one for every token"),
        ({"labels": torch.zeros(3, 11)}, ValueError, "class indices"),
        ({"bias": torch.zeros(4)}, ValueError, "one value for each"),
        ({"weight": torch.zeros(VOCABULARY, 8)}, ValueError, "don't fit"),
        ({"weight": torch.zeros(VOCABULARY, FEATURES).bfloat16()}, ValueError, "cast one of them"),
        ({"weight": torch.zeros(VOCABULARY * FEATURES)}, ValueError, "FSDP has sharded"),
    ],
    ids=str,
)
def test_errors_say_what_to_do(change, error, message):
    hidden, weight, labels, _ = problem()
    given = {"hidden": hidden, "weight": weight, "labels": labels} | change
    with pytest.raises(error, match=message):
        linear_cross_entropy(**given)


def test_a_weight_whose_memory_is_gone_is_refused():
    hidden, weight, labels, _ = problem()
    freed = weight.detach().clone()
    freed.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="reshard_after_forward=False"):
        linear_cross_entropy(hidden, freed, labels)


class Wrapped:
    """Stands for a kernel package: right or wrong on demand."""

    def __init__(self, error):
        self.error, self.calls = error, 0

    def __call__(self, terms):
        plain = backends._plain(terms)

        def kernel(*given):
            self.calls += 1
            return plain(*given) * (1 + self.error)

        return kernel


@pytest.fixture
def installed(monkeypatch, proofs_forgotten):
    """Puts a stand-in for Liger's kernel in its place."""

    def install(error):
        kernel = Wrapped(error)
        monkeypatch.setattr(backends, "_importable", lambda module: module == "liger_kernel")
        monkeypatch.setattr(backends, "_liger", kernel)
        return kernel

    return install


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_a_kernel_that_is_right_is_used_and_proved_once(installed, reduction):
    kernel = installed(0.0)
    hidden, weight, labels, _ = problem()
    options = {"softcap": 2.0, "z_loss": 0.1, "reduction": reduction}
    ours = linear_cross_entropy(hidden, weight, labels, **options)
    for calls in (2, 3):
        theirs = linear_cross_entropy(hidden, weight, labels, backend="liger", **options)
        assert kernel.calls == calls
        torch.testing.assert_close(theirs, ours)


def test_a_kernel_that_is_wrong_is_refused_with_its_error(installed):
    installed(1e-3)
    hidden, weight, labels, _ = problem()
    with pytest.raises(ValueError, match=r"loss was off by 0.001 against float64, where .* is allowed"):
        linear_cross_entropy(hidden, weight, labels, backend="liger")


def test_auto_takes_only_a_proved_kernel(installed):
    kernel = installed(0.0)
    device, terms = torch.device("cpu"), backends.HeadTerms()
    assert backends._automatic("sum", device, torch.float32, terms) == "liger"
    backends._automatic.cache_clear()
    backends._disproof.cache_clear()
    kernel.error = 0.1
    with pytest.warns(UserWarning, match="liger is installed but not used: .* loss was off by 0.1"):
        assert backends._automatic("sum", device, torch.float32, terms) is None


def test_a_kernel_without_memory_is_proved_at_the_next_call(installed, monkeypatch):
    """Out of memory is of the moment: it went for good, for the process, and the run did without the kernel."""
    proper, shortages = installed(0.0), [1]

    def short(terms):
        def kernel(*given):
            if shortages:
                shortages.pop()
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB")
            return proper(terms)(*given)

        return kernel

    monkeypatch.setattr(backends, "_liger", short)
    hidden, weight, labels, _ = problem()
    with pytest.raises(torch.OutOfMemoryError):
        linear_cross_entropy(hidden, weight, labels, backend="liger")
    theirs = linear_cross_entropy(hidden, weight, labels, backend="liger")
    torch.testing.assert_close(theirs, linear_cross_entropy(hidden, weight, labels))


def test_a_kernel_that_fails_is_not_right(installed, monkeypatch):
    installed(0.0)

    def broken(terms):
        def kernel(*given):
            raise OSError("no compiler")

        return kernel

    monkeypatch.setattr(backends, "_liger", broken)
    hidden, weight, labels, _ = problem()
    with pytest.raises(ValueError, match=r"it failed on a small problem .*OSError: no compiler"):
        linear_cross_entropy(hidden, weight, labels, backend="liger")


def test_backends_refuse_options_they_lack():
    hidden, weight, labels, _ = problem()
    with pytest.raises(ValueError, match="knows no z_loss, softcap"):
        linear_cross_entropy(hidden, weight, labels, backend="torch", z_loss=0.1, softcap=3.0)


def test_a_backend_that_is_absent_is_named(monkeypatch):
    monkeypatch.setattr(backends, "_importable", lambda module: False)
    hidden, weight, labels, _ = problem()
    for backend in ("liger", "cut_cross_entropy"):
        with pytest.raises(ImportError, match="which is not installed"):
            linear_cross_entropy(hidden, weight, labels, backend=backend)
    monkeypatch.delattr(F, "linear_cross_entropy", raising=False)
    with pytest.raises(ValueError, match="lacks"):
        linear_cross_entropy(hidden, weight, labels, backend="torch")


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="torch 2.13 brings it")
def test_the_built_in_is_right_in_float32():
    hidden, weight, labels, bias = problem(bias=True)
    ours = linear_cross_entropy(hidden, weight, labels, bias=bias)
    built_in = linear_cross_entropy(hidden, weight, labels, bias=bias, backend="torch")
    torch.testing.assert_close(built_in, ours)


def test_of_labels_that_do_not_count_none_is_out_of_bounds():
    hidden, weight, labels, _ = problem()
    labels[:] = 5000
    loss = linear_cross_entropy(hidden, weight, labels, ignore_index=5000, reduction="sum")
    assert loss == 0
    with pytest.raises(IndexError, match="Label 5000 is out of bounds"):
        linear_cross_entropy(hidden, weight, labels, ignore_index=-100)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32])
def test_labels_of_narrow_integers_are_read_as_they_are(dtype):
    hidden, weight, labels, _ = problem(ignored=0)
    labels = labels.clamp(max=200)
    labels[1] = 255 if dtype is torch.uint8 else -100
    ignored = int(labels[1, 0])
    narrow = linear_cross_entropy(hidden, weight, labels.to(dtype), ignore_index=ignored)
    assert torch.equal(narrow, linear_cross_entropy(hidden, weight, labels, ignore_index=ignored))
