"""Finds the parameters that low-bit optimizer states harm: embeddings, by class, name or tie.

Low-bit states share one scale within a block of values. An embedding's block mixes rows that are used in
every step with rows that are hardly ever used. The second moment of a rare row then rounds to zero while its
first moment does not, so that row's next step is as large as the learning rate over epsilon.
"""

import re

from torch import nn
from torch.nn import Parameter

_EMBEDDING_NAME = re.compile(
    r"(?:^|_)(?:wte|wpe|emb|embs|embeds?|embeddings?|tokens?|tables?|codebooks?|pos(?:itional)?_enc(?:odings?)?)(?:_|$)",
    re.IGNORECASE,
)


def at_risk(module: nn.Module) -> dict[Parameter, str]:
    """The parameters whose 8-bit states can go wrong, with their names.

    These are the weights of `nn.Embedding`, `nn.EmbeddingBag` and every class with "embedding" in its name,
    the parameters tied to them, and parameters outside torch's own layers whose names say so: ``wte``,
    ``pos_emb``, ``cls_token``, ``relative_position_bias_table``, ``codebook``.
    """
    found: dict[Parameter, str] = {}
    for path, owner in module.named_modules():
        embeds = (
            isinstance(owner, (nn.Embedding, nn.EmbeddingBag)) or "embedding" in type(owner).__name__.lower()
        )
        is_named = not _is_torchs_layer(owner) and _EMBEDDING_NAME.search(path.rpartition(".")[2]) is not None
        for name, parameter in owner._parameters.items():
            by_name = not _is_torchs_layer(owner) and _EMBEDDING_NAME.search(name) is not None
            if parameter is not None and parameter not in found and (embeds or is_named or by_name):
                found[parameter] = f"{path}.{name}" if path else name
    return found


def _is_torchs_layer(module: nn.Module) -> bool:
    containers = (nn.Module, nn.ParameterList, nn.ParameterDict)
    return type(module).__module__.startswith("torch.nn.") and type(module) not in containers
