"""What the benchmark of chunks trains: two towers under losses over the batch, CLIP, and a Llama's long row."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_memkit import checkpoint_chunks, checkpoint_modules, linear_cross_entropy
from lightning_memkit.activations.chunks.finding import find_chunkable

WIDTH, OUT = 24, 12
CLIP_TOKENS, CLIP_IMAGE = 16, 16
VOCABULARY = 2048

Loss = Callable[[Tensor, Tensor], Tensor]


def tower() -> nn.Sequential:
    """An encoder whose rows are independent."""
    layers = [layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU())]
    return nn.Sequential(*layers, nn.Linear(WIDTH, OUT))


def clip_loss(one: Tensor, other: Tensor) -> Tensor:
    """Radford et al. 2021: negatives are the other rows of the batch."""
    scores = 5 * F.normalize(one, dim=1) @ F.normalize(other, dim=1).T
    places = torch.arange(len(scores), device=scores.device)
    return (F.cross_entropy(scores, places) + F.cross_entropy(scores.T, places)) / 2


def siglip_loss(one: Tensor, other: Tensor) -> Tensor:
    """Zhai et al. 2023: every pair of the batch is a label of its own."""
    scores = 5 * F.normalize(one, dim=1) @ F.normalize(other, dim=1).T - 2
    return -F.logsigmoid(scores * (2 * torch.eye(len(scores)).to(scores) - 1)).sum() / len(scores)


def vicreg_loss(one: Tensor, other: Tensor) -> Tensor:
    """Bardes et al. 2022: variances and covariances over the batch."""
    loss = F.mse_loss(one, other)
    for out in (one, other):
        centered = out - out.mean(0)
        covariance = centered.T @ centered / (len(out) - 1)
        loss = loss + (1 - (out.var(0) + 1e-4).sqrt()).relu().mean()
        loss = loss + (covariance - covariance.diag().diag()).square().sum() / OUT
    return loss


def triplet_loss(one: Tensor, other: Tensor) -> Tensor:
    """Hermans et al. 2017: the hardest negative of the batch."""
    distances = torch.cdist(one, other)
    hardest = (distances + 1e6 * torch.eye(len(one)).to(one)).amin(1)
    return F.softplus(distances.diag() - hardest).mean()


LOSSES: dict[str, Loss] = {
    "CLIP": clip_loss, "SigLIP": siglip_loss, "VICReg": vicreg_loss, "hardest triplets": triplet_loss,
}  # fmt: skip


def trained(loss: Loss, rows: int | None, dtype: torch.dtype, seed: int, steps: int = 20) -> Tensor:
    """The weights of two towers after AdamW steps on batches of 24 pairs."""
    torch.manual_seed(seed)
    towers = nn.ModuleList([tower(), tower()]).to(dtype)
    if rows is not None:
        for name in ("0", "1"):
            checkpoint_chunks(towers.get_submodule(name), rows=rows)
    optimizer = torch.optim.AdamW(towers.parameters(), lr=1e-3)
    pairs = torch.randn(steps, 2, 24, WIDTH, dtype=torch.float64).to(dtype)
    for x, y in pairs:
        optimizer.zero_grad()
        loss(towers[0](x), towers[1](y)).backward()
        optimizer.step()
    return torch.cat([weight.detach().flatten() for weight in towers.parameters()])


class ClipTowers(nn.Module):
    """Both towers of CLIP, of transformers, with their projections."""

    def __init__(self, hidden: int, layers: int, seed: int) -> None:
        super().__init__()
        from transformers import CLIPConfig, CLIPModel

        shape = {
            "hidden_size": hidden, "intermediate_size": 4 * hidden, "num_hidden_layers": layers,
            "num_attention_heads": hidden // 32,
        }  # fmt: skip
        text = {**shape, "vocab_size": 512, "max_position_embeddings": CLIP_TOKENS, "eos_token_id": 2}
        vision = {**shape, "image_size": CLIP_IMAGE, "patch_size": 4}
        torch.manual_seed(seed)
        net: Any = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=OUT))
        self.text, self.vision = (
            _Tower(net.text_model, net.text_projection),
            _Tower(net.vision_model, net.visual_projection),
        )


class _Tower(nn.Module):
    def __init__(self, encoder: Any, projection: nn.Module) -> None:
        super().__init__()
        self.encoder, self.projection = encoder, projection

    def forward(self, given: Tensor) -> Tensor:
        return self.projection(self.encoder(given).pooler_output)


def clip_batch(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    """Token ids and images."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 512, (rows, CLIP_TOKENS), generator=generator)
    return ids, torch.randn(rows, 3, CLIP_IMAGE, CLIP_IMAGE, generator=generator)


class LongRow:
    """A Llama with full activation checkpointing on one row of tokens, its token-wise modules in chunks or not.

    Args:
        tokens: of the row.
        chunk: of tokens; None for none.
        layers: how many blocks.
        seed: of weights and tokens.
    """

    def __init__(self, tokens: int, chunk: int | None, layers: int, seed: int) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=256, intermediate_size=1024, num_hidden_layers=layers,
            num_attention_heads=4, num_key_value_heads=1, max_position_embeddings=tokens, use_cache=False,
        )  # fmt: skip
        self.net: Any = LlamaForCausalLM(config).train()
        self.ids = torch.randint(3, VOCABULARY, (1, tokens))
        if chunk is not None:
            few = self.ids[:, :64]
            for one in find_chunkable(self.net, lambda: self.net(few, labels=few).loss, "tokens"):
                checkpoint_chunks(one.module, tokens=chunk)
        checkpoint_modules(self.net, "full")

    def step(self, tokens: int | None = None) -> None:
        """Forward and backward of the row, or of its first tokens."""
        self.loss(self.ids[:, :tokens]).backward()

    def loss(self, ids: Tensor) -> Tensor:
        """The mean over the tokens, without logits."""
        hidden = self.net.model(ids).last_hidden_state
        return linear_cross_entropy(hidden, self.net.lm_head.weight, ids, shift=True)
