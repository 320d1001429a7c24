"""The rules of thumb behind a plan: bytes a parameter, and a configuration computed by hand."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, get_args

from torch import Tensor, nn

from lightning_memkit.planning.placed import Placement, chunked_head, gathered
from lightning_memkit.planning.problem import ChunkLimits, Row
from lightning_memkit.prediction.by_hand import (
    Blocks,
    ParameterCounts,
    Precision,
    Recipe,
    VocabularyHead,
)
from lightning_memkit.prediction.closed_form import ClosedForm, closed_form
from lightning_memkit.utilities.tensors import tensors_of

_RECIPES = {
    "float32": Recipe(),
    "16-bit mixed, copies stored (the literature's)": Recipe(precision="stored-copies"),
    "16-bit mixed, as autocast does it": Recipe(precision="bf16-mixed"),
    "bfloat16, split, exact states": Recipe(precision="bf16-true", compensation="split", states="exact"),
    "bfloat16, Kahan, compact states": Recipe(precision="bf16-true", compensation="kahan", states="compact"),
    "bfloat16, Kahan, AdamW8bit of bitsandbytes": Recipe(
        precision="bf16-true", compensation="kahan", states="8-bit"
    ),
    "bfloat16, 24 bits, 8-bit states": Recipe(
        precision="bf16-true", compensation="split24", states="8-bit-rows"
    ),
}
_OF_FAMILY = {
    "float32": "float32",
    "mixed bfloat16": "16-bit mixed, as autocast does it",
    "mixed float16": "16-bit mixed, as autocast does it",
    "bfloat16, exact sums": "bfloat16, split, exact states",
    "bfloat16, Kahan": "bfloat16, Kahan, compact states",
    "bfloat16, 24 bits": "bfloat16, 24 bits, 8-bit states",
}


def bytes_a_parameter() -> str:
    """A table of what each precision keeps for a parameter, in training with AdamW and in inference."""
    lines = [f"{'AdamW, bytes a parameter':<48}weights  gradients  states  compensation  total"]
    for name, recipe in _RECIPES.items():
        each = recipe.per_parameter
        lines.append(
            f"{name:<48}{each.weights:>7.3g}{each.gradients:>11.3g}{each.states:>8.3g}"
            f"{each.compensation:>14.3g}{each.total:>7.3g}"
        )
    lines.append("autocast adds 2 for each weight that it has cast, while its region lasts")
    lines.append("inference: float32 4, 16-bit mixed with stored copies 6, 16 bits 2, 8 bits 1, 4 bits 0.5")
    lines.append("states alone: AdamW 8, SGD with momentum 4, AdamW in 8 bits 2; with 16-bit states half")
    return "\n".join(lines)


def beside_prediction(row: Row, module: nn.Module, batch: Any, given: Mapping[str, Any] | None = None) -> str:
    """A configuration by hand, term by term with formulas, then next to its prediction; takes no time.

    Args:
        row: the configuration, with its prediction.
        module: gives the number of parameters and the shapes of a transformers model; may be on the meta
            device.
        batch: a micro-batch of the configuration.
        given: the Trainer's arguments given to the plan.
    """
    prediction, given = row.prediction, given or {}
    if prediction is None:
        raise ValueError(f"{row.family} was not predicted: {row.rejected}.")
    counts, placement = ParameterCounts.of(module), Placement.of(row, given)
    recipe = _recipe(row, counts, placement, given)
    blocks, head, hidden = _shapes(module, batch, placement, recipe)
    tensors = {id(one): one for one in tensors_of(batch)}.values()
    plain = closed_form(
        counts,
        recipe=recipe,
        blocks=blocks,
        head=None if placement.is_chunked else head,
        inputs_bytes=sum(one.nbytes for one in tensors),
    )
    terms = [*placement.of_terms(plain.terms, module, blocks.layers if blocks else 0)]
    value_bytes = 4 if recipe.precision == "32-true" else 2
    terms += gathered(module, placement.stage, value_bytes) if placement.stage else ()
    if head is not None and placement.is_chunked:
        terms += chunked_head(head.tokens, hidden, head.vocabulary, value_bytes)
    by_hand = ClosedForm(terms=tuple(terms))
    notes = []
    if not blocks:
        notes.append(
            "No shapes of blocks are known (no transformers config): activations are predicted only."
        )
    elif row.chunks != ChunkLimits():
        limits = str(row.chunks).removeprefix(", ")
        notes.append(f"By hand without {limits}: activations are less as predicted.")
    return "\n".join([str(by_hand), "", str(by_hand.beside(prediction)), *notes])


def _recipe(row: Row, counts: ParameterCounts, placement: Placement, given: Mapping[str, Any]) -> Recipe:
    """The recipe of a row; its optimizer, and what else only the module knows, follow from the prediction."""
    prediction = row.prediction
    assert prediction is not None
    recipe = _of_precision(row, counts, given)
    largest = prediction.anatomy.largest
    # FSDP2 accumulates gradients in the dtype of the weights.
    alone = placement.shares == 1 and not placement.is_released and recipe.precision == "bf16-true"
    recipe = replace(
        recipe,
        states=recipe.states if row.family.optimizer is None else "8-bit",
        float32_gradients=alone and largest.get("gradients", 0) > 3 * counts.trained,
    )
    kept = prediction.offloaded_bytes if placement.states_on_host else largest.get("optimizer_states", 0)

    def away(optimizer: str) -> float:
        form = closed_form(counts, recipe=replace(recipe, optimizer=optimizer))
        own = form.category_bytes("optimizer_states")
        own += form.category_bytes("compensation") if placement.states_on_host else 0
        return abs(own / placement.shares - kept)

    return replace(recipe, optimizer=min(("adamw", "momentum", "sgd"), key=away))


def _of_precision(row: Row, counts: ParameterCounts, given: Mapping[str, Any]) -> Recipe:
    """What the row's precision keeps for a parameter."""
    name = _OF_FAMILY.get(row.family["precision"].name)
    if name is not None:
        return _RECIPES[name]
    plugins = given.get("plugins") or []
    for plugin in plugins if isinstance(plugins, (list, tuple)) else [plugins]:
        if hasattr(plugin, "compensation"):
            states = "8-bit-rows" if plugin.states == "8-bit" else plugin.states
            return Recipe(precision="bf16-true", compensation=plugin.compensation, states=states)
    precision = str(given.get("precision"))
    if precision in get_args(Precision):
        return Recipe(precision=precision)  # pyright: ignore[reportArgumentType]
    assert row.prediction is not None
    weights = row.prediction.anatomy.largest.get("weights", 0) / max(1, counts.trained + counts.frozen)
    return Recipe() if weights > 3 else Recipe(precision="bf16-true")


def _shapes(
    module: nn.Module, batch: Any, placement: Placement, recipe: Recipe
) -> tuple[Blocks | None, VocabularyHead | None, int]:
    """Blocks, head and hidden size of a model with a transformers config, for a batch with token ids."""
    configs = (getattr(one, "config", None) for one in module.modules())
    config: Any = next((one for one in configs if hasattr(one, "to_dict")), None)
    ids = next((one for one in tensors_of(batch) if one.dim() == 2 and not one.is_floating_point()), None)
    if config is None or ids is None:
        return None, None, 0
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    if any(
        not getattr(config, name, None)
        for name in ("num_hidden_layers", "hidden_size", "num_attention_heads")
    ):
        return None, None, 0
    return _blocks(config, ids, placement, recipe), _head(config, ids), config.hidden_size


def _blocks(config: Any, ids: Tensor, placement: Placement, recipe: Recipe) -> Blocks:
    gated = getattr(config, "hidden_act", "") in ("silu", "swish")
    dropout = any(getattr(config, name, 0) for name in ("hidden_dropout_prob", "resid_pdrop", "dropout"))
    return Blocks(
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        length=ids.shape[1],
        rows=ids.shape[0],
        value_bytes=4 if recipe.precision == "32-true" else 2,
        mask_bytes=int(dropout),
        keeps_scores=getattr(config, "_attn_implementation", "") == "eager",
        mlp_width=getattr(config, "intermediate_size", None),
        mlp_tensors=4 if gated else 2,
        checkpointed=placement.policy == "full",
    )


def _head(config: Any, ids: Tensor) -> VocabularyHead | None:
    vocabulary = getattr(config, "vocab_size", None)
    return VocabularyHead(tokens=ids.numel(), vocabulary=vocabulary) if vocabulary else None
