"""What low-bit states harm is found by class, by name, by place and by tie."""

import torch
from torch import nn
from torch.nn import Parameter

from lightning_memkit.optim.at_risk import at_risk


class Odd(nn.Module):
    """What is at risk by its class, its name or its place, beside what is not."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = type("Bag", (nn.EmbeddingBag,), {})(8, 4)
        self.words = type("Words", (nn.Embedding,), {})(8, 4)
        self.vocabulary = type("VocabParallelEmbedding", (Plain,), {})()
        self.wpe = Plain()
        self.cls_token = Parameter(torch.zeros(1, 4))
        self.relative_position_bias_table = Parameter(torch.zeros(9, 2))
        self.codebook = Parameter(torch.zeros(9, 2))
        self.lora_embedding_A = nn.ParameterDict({"default": torch.zeros(2, 4)})
        self.stem_embed = nn.Sequential(nn.Linear(4, 4))
        self.embed = nn.Conv1d(4, 4, 1)
        self.remember = Parameter(torch.zeros(3))
        self.temperature = Parameter(torch.zeros(3))
        self.inner = Plain()
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.wpe.weight


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = Parameter(torch.zeros(8, 4))


def test_what_is_at_risk():
    assert set(at_risk(Odd()).values()) == {
        "bag.weight",
        "words.weight",
        "vocabulary.weight",
        "wpe.weight",
        "cls_token",
        "relative_position_bias_table",
        "codebook",
        "lora_embedding_A.default",
    }
