"""Makes a small copy (a twin) of a transformers model, which treats packed documents as the model does."""

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

_MOST_PARAMETERS = 30_000_000
_VOCABULARY = 64
_HEADS = 4
_WIDTH = 64
_LEAST_LAYERS, _MOST_LAYERS = 2, 12
_TEXT_CONFIGS = ("text_config", "language_config", "llm_config")


def twin_of(model: Any) -> Any | None:
    """A model of the same class with few weights, all of them drawn at random, in float32 on the CPU.

    Weights that are initialized to zero (gates, scales of residuals) are drawn, too: zeros would hide what
    depends on them.

    Args:
        model: a model of the transformers package; its weights may be on any device or the meta device, sharded or
            quantized.

    Returns:
        A copy of the model itself if it is small, otherwise a model of its class from a smaller config; None
        if its class can't be built from one.
    """
    generator = torch.Generator().manual_seed(0)
    for made in _made(model):
        made.eval().requires_grad_(False)
        for parameter in made.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.15, generator=generator)
            elif parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
        return made
    return None


def _made(model: Any) -> Iterator[Any]:
    if _is_small_and_plain(model):
        try:
            yield copy.deepcopy(model).float()
        except Exception:  # something in it can't be copied: build one from its class
            pass
    for smaller in (_narrow, _shallow):
        config = smaller(model.config)
        try:
            with torch.device("meta"):
                size = sum(parameter.numel() for parameter in type(model)(copy.deepcopy(config)).parameters())
            if size <= _MOST_PARAMETERS:
                yield type(model)(config).float()
        except Exception:  # an architecture whose sizes depend on each other
            continue


def _is_small_and_plain(model: nn.Module) -> bool:
    parameters = list(model.parameters())
    plain = all(
        type(one) is nn.Parameter and one.device.type == "cpu" and one.is_floating_point()
        for one in parameters
    )
    return plain and sum(one.numel() for one in parameters) <= _MOST_PARAMETERS


def _shallow(config: Any) -> Any:
    """The config with fewer layers (some of each kind) and a small vocabulary."""
    config = _copied(config)
    for part in _parts(config):
        _cut_layers(part)
        if isinstance(getattr(part, "vocab_size", None), int):
            _cut_vocabulary(part)
    return config


def _narrow(config: Any) -> Any:
    """The shallow config, with fewer heads of the same size and a narrow MLP."""
    config = _shallow(config)
    for part in _parts(config):
        heads, width = getattr(part, "num_attention_heads", None), getattr(part, "hidden_size", None)
        if not isinstance(heads, int) or not isinstance(width, int) or heads <= _HEADS:
            continue
        groups = getattr(part, "num_key_value_heads", None)
        _put(part, "num_attention_heads", _HEADS)
        if isinstance(groups, int):
            _put(part, "num_key_value_heads", max(1, _HEADS * groups // heads))
        _put(part, "hidden_size", width * _HEADS // heads)
        for name in ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"):
            if isinstance(getattr(part, name, None), int):
                _put(part, name, min(getattr(part, name), _WIDTH))
    return config


def _copied(config: Any) -> Any:
    config = copy.deepcopy(config)
    for name in ("quantization_config",):  # the twin's weights are drawn at random
        if hasattr(config, name):
            delattr(config, name)
    return config


def _parts(config: Any) -> list[Any]:
    inner = [getattr(config, name, None) for name in _TEXT_CONFIGS]
    return [config, *(one for one in inner if one is not None and not isinstance(one, dict))]


def _put(config: Any, name: str, value: Any) -> None:
    try:
        setattr(config, name, value)
    except (AttributeError, NotImplementedError):  # a property computed from other fields
        return


def _cut_layers(config: Any) -> None:
    layers = getattr(config, "num_hidden_layers", None)
    if not isinstance(layers, int):
        return
    lists = {
        name: value
        for name, value in vars(config).items()
        if isinstance(value, (list, tuple)) and len(value) == layers
    }
    kept = min(layers, _LEAST_LAYERS)
    for value in lists.values():
        kinds = {str(one) for one in value}
        first = [next(index for index, one in enumerate(value) if str(one) == kind) for kind in kinds]
        kept = max(kept, min(max(first) + 1, _MOST_LAYERS))
    if not lists:  # kinds may alternate by a rule that is not in a list
        kept = min(layers, 4)
    _put(config, "num_hidden_layers", kept)
    for name, value in lists.items():
        _put(config, name, value[:kept])


def _cut_vocabulary(config: Any) -> None:
    before, after = config.vocab_size, min(config.vocab_size, _VOCABULARY)
    _put(config, "vocab_size", after)
    for name, value in list(vars(config).items()):
        if name.endswith("_token_id") and isinstance(value, int) and after <= value < before:
            _put(config, name, 0)
        elif name.endswith("_token_id") and isinstance(value, list):
            _put(config, name, [one % after for one in value])


def tokens_for(model: Any, count: int) -> Tensor:
    """Random tokens, none of which is special in a model."""
    size = model.get_input_embeddings().weight.shape[0]
    special = {
        value
        for part in _parts(model.config)
        for name, value in vars(part).items()
        if name.endswith("_token_id") and isinstance(value, int)
    }
    usual = torch.tensor([one for one in range(2, min(size, _VOCABULARY)) if one not in special])
    return usual[torch.randint(len(usual), (count,), generator=torch.Generator().manual_seed(1))]
