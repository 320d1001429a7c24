"""The models whose activations are saved or made again: a Llama of 34M weights, a ViT and a CNN."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model and its batch.

    Args:
        build: gives the model, always with the same weights.
        loss: runs the model's forward to its loss.
        policies: `checkpoint_modules`' policies, in the order of the table.
        steps_take_seconds: fewer pairs are enough where a step takes a second or more.
    """

    build: Callable[[], nn.Module]
    loss: Callable[[nn.Module], Tensor]
    policies: tuple[str, ...]
    steps_take_seconds: bool = False


HAND_MADE = ("every:2", "selective:attention,matmul", "selective", "selective:attention", "full")
BUDGETS = ("budget:0.8", "budget:0.6", "budget:0.5", "budget:0.4", "budget:0.2")


def llama(seed: int) -> Case:
    """33.7M weights, 2 x 512 tokens, float32; the loss is computed inside the model."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=512, intermediate_size=1376, num_hidden_layers=8, num_attention_heads=8, vocab_size=8192,
        use_cache=False, max_position_embeddings=512,
    )  # fmt: skip
    ids = torch.randint(8192, (2, 512), generator=torch.Generator().manual_seed(seed))

    def build() -> nn.Module:
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).train()

    return Case(
        build=build,
        loss=lambda model: model(input_ids=ids, labels=ids).loss,
        policies=HAND_MADE + BUDGETS,
        steps_take_seconds=True,
    )


def vit(seed: int) -> Case:
    """A ViT with dropout on 64 x 64 pixels."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=192, intermediate_size=768, num_hidden_layers=6, num_attention_heads=6, image_size=64,
        patch_size=8, hidden_dropout_prob=0.1,
    )  # fmt: skip
    config.num_labels = 10
    generator = torch.Generator().manual_seed(seed)
    pixels, labels = (
        torch.randn(8, 3, 64, 64, generator=generator),
        torch.randint(10, (8,), generator=generator),
    )

    def build() -> nn.Module:
        torch.manual_seed(seed)
        return ViTForImageClassification(config).train()

    return Case(
        build=build,
        loss=lambda model: model(pixel_values=pixels, labels=labels).loss,
        policies=HAND_MADE + ("budget:0.6", "budget:0.4"),
    )


class Residual(nn.Module):
    """Two convolutions with BatchNorm and a residual."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        """Images to images of the same shape."""
        return torch.relu(x + self.body(x))


class ConvNet(nn.Module):
    """Six residual blocks and a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 3, padding=1)
        self.blocks = nn.Sequential(*(Residual(32) for _ in range(6)))
        self.head = nn.Linear(32, 10)

    def forward(self, pixels: Tensor, labels: Tensor) -> Tensor:
        """The loss of a batch."""
        return F.cross_entropy(self.head(self.blocks(self.stem(pixels)).mean(dim=(2, 3))), labels)


def cnn(seed: int) -> Case:
    """A residual CNN with BatchNorm on 32 x 32 pixels."""
    generator = torch.Generator().manual_seed(seed)
    pixels, labels = (
        torch.randn(8, 3, 32, 32, generator=generator),
        torch.randint(10, (8,), generator=generator),
    )

    def build() -> nn.Module:
        torch.manual_seed(seed)
        return ConvNet().train()

    policies = ("every:2", "selective:matmul", "selective", "full", "budget:0.6", "budget:0.4")
    return Case(build=build, loss=lambda model: model(pixels, labels), policies=policies)


CASES: dict[str, Callable[[int], Case]] = {"llama": llama, "vit": vit, "cnn": cnn}
