import pytest
from torch import nn

from lightning_memkit.activations.blocks import describe_blocks, find_blocks
from tests.activations.models import CAUSAL, Block, ConvBlock, ConvNet, Stack, transformers_model


def names(module, patterns=None):
    return [name for name, _ in find_blocks(module, patterns)]


def test_repeated_modules_of_a_list_are_blocks():
    assert names(Stack(depth=3)) == ["blocks.0", "blocks.1", "blocks.2"]


def test_stages_give_their_blocks():
    found = find_blocks(ConvNet())
    assert [name for name, _ in found] == [f"stages.{i}.blocks.{j}" for i in range(2) for j in range(2)]
    assert all(isinstance(block, ConvBlock) for _, block in found)


def test_experts_inside_a_block_stay_inside():
    class Expert(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.Linear(8, 8)

    class Mixture(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = nn.ModuleList(Expert() for _ in range(4))

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(8)
            self.mixture = Mixture()

    assert names(nn.Sequential(Layer(), Layer())) == ["0", "1"]


def test_lone_layers_and_embeddings_are_no_blocks():
    model = nn.Sequential(nn.Embedding(4, 4), nn.Embedding(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    assert names(model) == []
    assert names(model, ["Embedding"]) == []


@pytest.mark.parametrize(("pattern", "shown"), [("Block", "'Block'"), (Block, "Block")])
def test_a_pattern_without_a_list_is_refused(pattern, shown):
    with pytest.raises(ValueError, match=rf"blocks={shown} is one pattern; .* write blocks=\[{shown}\]\."):
        find_blocks(Stack(depth=2), pattern)


def test_torch_transformer_gives_encoder_and_decoder_layers():
    model = nn.Transformer(8, 2, 2, 3, 16, batch_first=True)
    assert names(model) == ["encoder.layers.0", "encoder.layers.1"] + [
        f"decoder.layers.{i}" for i in range(3)
    ]


@pytest.mark.parametrize("name", CAUSAL)
def test_transformers_layers_are_found_without_importing_it_for_others(name):
    blocks = find_blocks(transformers_model(name))
    assert len(blocks) == 2
    assert all("Layer" in type(block).__name__ or "Block" in type(block).__name__ for _, block in blocks)


@pytest.mark.parametrize(
    "pattern",
    [Block, "Block", "blocks.*", "tests.activations.models.Block", "B*k"],
    ids=["class", "class name", "module name", "class path", "glob"],
)
def test_patterns_match_class_name_and_path(pattern):
    assert names(Stack(depth=2), [pattern]) == ["blocks.0", "blocks.1"]


def test_of_nested_matches_the_outermost_wins():
    assert names(Stack(depth=2), ["Sequential", "Block", "Linear"]) == ["blocks.0", "blocks.1", "head"]


def test_describe_counts_classes():
    assert describe_blocks(find_blocks(Stack(depth=3))) == "3 Block (blocks.0, ...)"
    assert describe_blocks([]) == "none"


def test_what_is_no_pattern_is_refused():
    with pytest.raises(ValueError, match="blocks=3 is no list: write the names"):
        find_blocks(nn.ModuleList([nn.Linear(2, 2)]), 3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="blocks holds 3, which is no pattern: write the names"):
        find_blocks(nn.ModuleList([nn.Linear(2, 2)]), [3])  # pyright: ignore[reportArgumentType]
