"""Losses that are no mean over rows, each with the modules whose outputs it compares, and the batch they get."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ROWS, WIDTH, OUT = 10, 6, 4
Batch = dict[str, Tensor]


def tower() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, OUT))


class Pair(nn.Module):
    """Two towers, a scale, a teacher of the first tower, and its queue and centre."""

    queue: Tensor
    centre: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = tower(), tower()
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.teacher = tower().requires_grad_(False)
        self.router = nn.Linear(OUT, 3)
        self.register_buffer("queue", F.normalize(torch.randn(12, OUT), dim=1))
        self.register_buffer("centre", torch.zeros(OUT))


def unit(x: Tensor) -> Tensor:
    return F.normalize(x, dim=1)


def clip(net: Pair, batch: Batch) -> Tensor:
    scores = net.scale.exp() * unit(net.first(batch["x"])) @ unit(net.second(batch["y"])).T
    labels = torch.arange(len(scores))
    return (F.cross_entropy(scores, labels) + F.cross_entropy(scores.T, labels)) / 2


def simclr(net: Pair, batch: Batch) -> Tensor:
    """One tower, both views in one call of it."""
    views = unit(net.first(torch.cat([batch["x"], batch["y"]])))
    scores = (views @ views.T / 0.5).fill_diagonal_(float("-inf"))
    return F.cross_entropy(scores, torch.arange(2 * ROWS).roll(ROWS))


def simclr_twice(net: Pair, batch: Batch) -> Tensor:
    """One tower, called once a view."""
    views = unit(torch.cat([net.first(batch["x"]), net.first(batch["y"])]))
    scores = (views @ views.T / 0.5).fill_diagonal_(float("-inf"))
    return F.cross_entropy(scores, torch.arange(2 * ROWS).roll(ROWS))


def triplet(net: Pair, batch: Batch) -> Tensor:
    """The hardest positive and negative within the batch; the norm keeps a bias from having a gradient of rounding."""
    out = net.first(batch["x"])
    apart = (out[:, None] - out[None]).square().sum(2)
    same = batch["label"][:, None] == batch["label"][None]
    hardest = torch.where(same, apart, 0.0).amax(1) - torch.where(same, float("inf"), apart).amin(1)
    return (hardest + 1.0).relu().mean() + 0.1 * out.square().mean()


def siglip(net: Pair, batch: Batch) -> Tensor:
    scores = net.scale * unit(net.first(batch["x"])) @ unit(net.second(batch["y"])).T
    return -F.logsigmoid((2 * torch.eye(len(scores), dtype=scores.dtype) - 1) * scores).sum() / len(scores)


def vicreg(net: Pair, batch: Batch) -> Tensor:
    one, other = net.first(batch["x"]), net.second(batch["y"])
    loss = F.mse_loss(one, other)
    for out in (one, other):
        loss = loss + (1 - (out.var(0) + 1e-4).sqrt()).relu().mean()
        centred = out - out.mean(0)
        loss = loss + (centred.T @ centred / (len(out) - 1)).fill_diagonal_(0).square().sum() / OUT
    return loss


def dino(net: Pair, batch: Batch) -> Tensor:
    """A teacher that is the mean of the weights, and the centre of what it gives."""
    with torch.no_grad():
        for mean, weight in zip(net.teacher.parameters(), net.first.parameters(), strict=True):
            mean.lerp_(weight, 0.1)
        given = net.teacher(batch["y"])
        wanted = ((given - net.centre) / 0.1).softmax(1)
        net.centre.lerp_(given.mean(0), 0.1)
    return -(wanted * net.first(batch["x"]).log_softmax(1)).sum(1).mean()


def moco(net: Pair, batch: Batch) -> Tensor:
    """Negatives from a queue, which every batch enters."""
    out = unit(net.first(batch["x"]))
    with torch.no_grad():
        keys = unit(net.teacher(batch["y"]))
    scores = torch.cat([(out * keys).sum(1, keepdim=True), out @ net.queue.T], 1) / 0.2
    net.queue = torch.cat([keys, net.queue])[: len(net.queue)]
    return F.cross_entropy(scores, torch.zeros(len(out), dtype=torch.long))


def focal(net: Pair, batch: Batch) -> Tensor:
    each = F.cross_entropy(net.first(batch["x"]), batch["label"], reduction="none")
    return ((1 - (-each).exp()).square() * each).sum() / (batch["label"] > 0).sum()


def balanced(net: Pair, batch: Batch) -> Tensor:
    """A router's balancing loss: fractions of the whole batch times mean probabilities of the whole batch."""
    out = net.first(batch["x"])
    probabilities = net.router(out).softmax(1)
    fractions = F.one_hot(probabilities.argmax(1), 3).to(out.dtype).mean(0)
    return out.square().mean() + 3 * (fractions * probabilities.mean(0)).sum()


LOSSES: dict[str, Callable[[Pair, Batch], Tensor]] = {
    loss.__name__: loss
    for loss in (clip, simclr, simclr_twice, triplet, siglip, vicreg, dino, moco, focal, balanced)
}


@dataclass(frozen=True)
class Trained:
    """What came of a few steps."""

    losses: list[float]
    weights: dict[str, Tensor]


def batches(steps: int, dtype: torch.dtype) -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(5)
    for _ in range(steps):
        x, y = torch.randn(2, ROWS, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
        yield {"x": x, "y": y, "label": torch.randint(0, OUT, (ROWS,), generator=generator)}


def train(name: str, dtype: torch.dtype, prepare: Callable[[Pair], Any], steps: int = 20) -> Trained:
    """AdamW over a loss, after something was done to the modules."""
    torch.manual_seed(2)
    net = Pair().to(dtype)
    prepare(net)
    optimizer = torch.optim.AdamW([one for one in net.parameters() if one.requires_grad], lr=1e-2)
    losses = []
    for batch in batches(steps, dtype):
        optimizer.zero_grad()
        loss = LOSSES[name](net, batch)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return Trained(losses, {key: value.detach().double() for key, value in net.state_dict().items()})
