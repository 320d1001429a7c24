"""Lazy logits give what the computed ones give: in the loss, and in every operation that reads them."""

# pyright: reportArgumentType=false, reportOptionalMemberAccess=false, reportAttributeAccessIssue=false
import copy
import inspect
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_memkit.loss.lazy_logits import LazyLogits
from lightning_memkit.loss.switch import use_chunked_loss
from lightning_memkit.memory.meter import ByteMeter
from lightning_memkit.utilities.errors import NoEffectWarning

CLASSES = 50


class Net(nn.Module):
    """A head whose logits go to a function that the test chooses."""

    def __init__(self, read, bias=True):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, CLASSES, bias=bias)
        self.read = read

    def forward(self, x, y):
        return self.read(self.head(self.body(x)), y)


def inputs():
    y = torch.randint(CLASSES, (3, 6))
    y[0, :2] = -100
    return torch.randn(3, 6, 8), y


def outcome(net, *given):
    net.zero_grad()
    out = net(*given)
    out.sum().backward()
    return out.detach(), [p.grad.clone() for p in net.parameters()]


KEPT_LAZY = {
    "flattened": lambda z, y: F.cross_entropy(z.flatten(0, 1), y.flatten()),
    "view": lambda z, y: F.cross_entropy(z.float().view(-1, CLASSES), y.view(-1)),
    "reshape": lambda z, y: F.cross_entropy(torch.reshape(z, (-1, CLASSES)), y.reshape(-1)),
    "module": lambda z, y: nn.CrossEntropyLoss(label_smoothing=0.1)(z.flatten(0, -2), y.flatten()),
    "by token": lambda z, y: F.cross_entropy(z.flatten(0, 1), y.flatten(), reduction="none"),
    "summed": lambda z, y: F.cross_entropy(input=z.flatten(0, 1), target=y.flatten(), reduction="sum"),
    "ignored 7": lambda z, y: F.cross_entropy(z[1:].flatten(0, 1), y[1:].flatten(), ignore_index=7),
    "shifted": lambda z, y: F.cross_entropy(
        z[..., :-1, :].contiguous().view(-1, CLASSES), y[..., 1:].flatten()
    ),
    "shifted, short": lambda z, y: F.cross_entropy(z[:, :-1].flatten(0, 1), y[:, 1:].flatten()),
    "masked": lambda z, y: F.cross_entropy(z[y != -100], y[y != -100]),
    "transposed": lambda z, y: F.cross_entropy(z.transpose(1, 2), y),
    "transposed, negative": lambda z, y: F.cross_entropy(z.transpose(-1, -2).contiguous(), y),
    "capped": lambda z, y: F.cross_entropy((torch.tanh(z / 2.0) * 2.0).flatten(0, 1), y.flatten()),
    "other cap": lambda z, y: F.cross_entropy((3.0 * torch.tanh(0.2 * z)).flatten(0, 1), y.flatten()),
    "scaled": lambda z, y: F.cross_entropy((z * 0.3 / 2).flatten(0, 1), y.flatten()),
    "double": lambda z, y: F.cross_entropy(z.to(torch.float64).flatten(0, 1), y.flatten()).float(),
}
COMPUTED = {
    "class weights": lambda z, y: F.cross_entropy(z.flatten(0, 1), y.flatten(), torch.ones(CLASSES) * 2),
    "probabilities": lambda z, y: F.cross_entropy(z.flatten(0, 1), torch.full((18, CLASSES), 1 / CLASSES)),
    "log_softmax": lambda z, y: F.nll_loss(z.log_softmax(-1).flatten(0, 1), y.flatten()),
    "one class": lambda z, y: z[..., 3].square().mean(),
    "some classes": lambda z, y: z[:, :, :7].square().mean(),
    "classes by list": lambda z, y: z[:, :, [1, 2]].square().mean(),
    "half of the view": lambda z, y: z.view(3, 6, 2, CLASSES // 2).square().mean(),
    "bits": lambda z, y: z.square().mean() + z.detach().view(torch.int32).float().mean() * 0,
    "plus": lambda z, y: (z + 1).square().mean(),
    "joined": lambda z, y: torch.cat([z, z], 1).square().mean(),
    "in place": lambda z, y: F.cross_entropy(z.mul_(2).flatten(0, 1), y.flatten()) + z.mean(),
    "capped twice": lambda z, y: F.cross_entropy(z.tanh().tanh().flatten(0, 1), y.flatten()),
    "negative cap": lambda z, y: F.cross_entropy((z.tanh() * -2.0).flatten(0, 1), y.flatten()),
    "by a tensor": lambda z, y: (z * torch.tensor(2.0)).square().mean(),
    "transposed, indexed": lambda z, y: z.transpose(1, 2)[:, 2].square().mean(),
}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", KEPT_LAZY)
def test_loss_and_gradients_are_the_plain_ones_without_the_logits(name, bias):
    net, given = Net(KEPT_LAZY[name], bias), inputs()
    plain, plain_gradients = outcome(net, *given)
    undo = use_chunked_loss(net, heads=["head"])
    ours, gradients = outcome(net, *given)
    torch.testing.assert_close(ours, plain)
    torch.testing.assert_close(gradients, plain_gradients)
    undo()
    assert torch.equal(outcome(net, *given)[0], plain)


@pytest.mark.parametrize("name", COMPUTED)
def test_other_operations_see_the_real_logits_and_are_reported_once(name):
    net, given = Net(COMPUTED[name]), inputs()
    plain, plain_gradients = outcome(net, *given)
    use_chunked_loss(net, heads=["head"])
    with pytest.warns(
        NoEffectWarning, match=r"logits of head, 3\.52 KiB, were computed in full: \w+ was"
    ) as told:
        ours, gradients = outcome(net, *given)
    torch.testing.assert_close(ours, plain)
    torch.testing.assert_close(gradients, plain_gradients)
    before = len([w for w in told if w.category is NoEffectWarning])
    with warnings.catch_warnings(record=True) as again:
        warnings.simplefilter("always")
        outcome(net, *given)
    assert not again
    assert before == 1


def test_reading_them_without_gradients_is_no_fault():
    hits = []

    def read(z, y):
        with torch.no_grad():
            hits.append((z.argmax(-1) == y).float().mean())
        loss = F.cross_entropy(z.flatten(0, 1), y.flatten())
        hits.append(z.detach().softmax(-1).sum())
        return loss

    net, given = Net(read), inputs()
    plain = outcome(net, *given)
    use_chunked_loss(net, heads=["head"])
    ours = outcome(net, *given)
    torch.testing.assert_close(ours, plain)
    torch.testing.assert_close(hits[2:], hits[:2])


def test_facts_are_known_without_computing():
    seen = []

    def read(z, y):
        seen.append(
            (z.shape, z.size(-1), z.ndim, z.dtype, z.device, z.numel(), len(z), z.is_floating_point())
        )
        seen.append(repr(z))
        assert z.untyped_storage().nbytes() == 0
        assert isinstance(z, LazyLogits)
        return F.cross_entropy(z.flatten(0, 1), y.flatten())

    net = Net(read)
    use_chunked_loss(net, heads=["head"])
    outcome(net, *inputs())
    assert seen[0][:4] == ((3, 6, CLASSES), CLASSES, 3, torch.float32)
    assert seen[0][5:] == (18 * CLASSES, 3, True)
    assert seen[1] == "LazyLogits((3, 6, 50), torch.float32, not computed)"


def test_memory_stays_below_the_logits():
    net = Net(lambda z, y: F.cross_entropy(z.flatten(0, 1), y.flatten()))
    net.head = nn.Linear(8, 40_000)
    x, y = torch.randn(1, 2000, 8), torch.randint(40_000, (1, 2000))
    use_chunked_loss(net, heads=["head"])
    with ByteMeter() as meter:
        net(x, y).backward()
    assert meter.peak_bytes < x.size(1) * 40_000 * 4 / 5


def test_autocast_is_the_one_of_the_forward():
    net, (x, y) = Net(lambda z, y: z), inputs()
    use_chunked_loss(net, heads=["head"])
    with torch.autocast("cpu", torch.bfloat16):
        logits = net(x, y)
        assert logits.dtype is torch.bfloat16
        assert F.cross_entropy(logits.flatten(0, 1), y.flatten()).dtype is torch.float32
    with pytest.warns(NoEffectWarning):
        assert (logits + 0).dtype is torch.bfloat16


def test_hidden_states_changed_in_place_are_noticed():
    net, (x, y) = Net(lambda z, y: z), inputs()
    use_chunked_loss(net, heads=["head"])
    with torch.no_grad():
        net.body = nn.Identity()
        logits = net(x, y)
        x.add_(1)
        with pytest.raises(RuntimeError, match="changed in place"):
            logits.sum()


class Hidden(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z):
        return z.sum()

    @staticmethod
    def backward(ctx, *gradients):
        return gradients[0].expand(3, 6, CLASSES)


def test_a_gradient_that_would_be_lost_is_an_error():
    net, given = Net(lambda z, y: Hidden.apply(z)), inputs()
    use_chunked_loss(net, heads=["head"])
    with pytest.raises(RuntimeError, match="never computed"):
        outcome(net, *given)


def test_undo_and_copies():
    net, given = Net(KEPT_LAZY["flattened"]), inputs()
    signature = inspect.signature(net.head.forward)
    undo = use_chunked_loss(net, heads=["he*"])
    assert inspect.signature(net.head.forward) == signature
    twin = copy.deepcopy(net)
    with torch.no_grad():
        twin.head.weight.zero_()
        twin.head.bias.zero_()
    torch.testing.assert_close(twin(*given), torch.tensor(CLASSES).log())
    assert net(*given) != twin(*given)
    undo()
    assert "forward" not in vars(net.head)
    assert type(net.head(torch.randn(2, 8))) is torch.Tensor
    assert type(twin.head(torch.randn(2, 8))) is torch.Tensor
    use_chunked_loss(net, heads=["head"])()


def test_a_patch_on_top_of_ours_survives_the_undo():
    net = Net(KEPT_LAZY["flattened"])
    undo = use_chunked_loss(net, heads=["head"])
    ours = net.head.forward
    net.head.forward = lambda z: ours(z)
    undo()
    assert type(net.head(torch.randn(2, 8))) is torch.Tensor


def test_what_cannot_be_replaced_is_refused():
    net = Net(KEPT_LAZY["flattened"])
    with pytest.raises(ValueError, match=r"the largest ones are: head, body"):
        use_chunked_loss(net, heads=["decoder"])
    with pytest.raises(ValueError, match=r"write heads=\['head'\]"):
        use_chunked_loss(net, heads="head")
    with pytest.raises(ValueError, match="choose one of"):
        use_chunked_loss(net, heads=["head"], backend="triton")
    with pytest.raises(ValueError, match=r'as in heads=\["head"\], or call linear_cross_entropy'):
        use_chunked_loss(net)
    undo = use_chunked_loss(net, heads=["head"])
    with pytest.raises(ValueError, match="call the undo of the first"):
        use_chunked_loss(net, heads=["head"])
    undo()
    net.compile(backend="eager")
    with pytest.raises(ValueError, match="Net is compiled and holds head"):
        use_chunked_loss(net, heads=["head"])


def test_a_layer_with_a_forward_of_its_own_is_refused():
    class Adapted(nn.Linear):
        def forward(self, input):
            return super().forward(input) + 1

    net = Net(KEPT_LAZY["flattened"])
    net.head = Adapted(8, CLASSES)
    with pytest.raises(ValueError, match="head is a Adapted, no plain nn.Linear"):
        use_chunked_loss(net, heads=["head"])
