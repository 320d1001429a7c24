"""The rules of thumb behind a plan: bytes a parameter, and a row by hand beside its prediction."""

from typing import Any

from torch import Tensor, nn

from lightning_memkit.memory.meter import tensors_in
from lightning_memkit.planning.search import Row
from lightning_memkit.prediction.by_hand import MOMENTS, Blocks, ParameterCounts, Recipe, VocabularyHead
from lightning_memkit.prediction.closed_form import closed_form
from lightning_memkit.prediction.result import Prediction

_RECIPES = {
    "float32": Recipe(),
    "16-bit mixed, copies stored (the literature's)": Recipe(precision="stored-copies"),
    "16-bit mixed, as autocast does it": Recipe(precision="bf16-mixed"),
    "bfloat16, split, exact states": Recipe(precision="bf16-true", compensation="split", states="exact"),
    "bfloat16, Kahan, compact states": Recipe(precision="bf16-true", compensation="kahan", states="compact"),
    "bfloat16, Kahan, 8-bit states": Recipe(precision="bf16-true", compensation="kahan", states="8-bit"),
}
_OF_FAMILY = {
    "float32": "float32",
    "mixed bfloat16": "16-bit mixed, as autocast does it",
    "mixed float16": "16-bit mixed, as autocast does it",
    "bfloat16, exact sums": "bfloat16, split, exact states",
    "bfloat16, Kahan": "bfloat16, Kahan, compact states",
}


def bytes_a_parameter() -> str:
    """The seeds: what each precision keeps of a parameter that AdamW trains, and of one that is only used."""
    lines = [f"{'AdamW, bytes a parameter':<48}weights  gradients  states  compensation  total"]
    for name, recipe in _RECIPES.items():
        each = recipe.per_parameter
        lines.append(
            f"{name:<48}{each.weights:>7g}{each.gradients:>11g}{each.states:>8g}{each.compensation:>14g}"
            f"{each.total:>7g}"
        )
    lines.append("autocast adds 2 for each weight that it has cast, while its region lasts")
    lines.append("inference: float32 4, 16-bit mixed with stored copies 6, 16 bits 2, 8 bits 1, 4 bits 0.5")
    lines.append("states alone: AdamW 8, SGD with momentum 4, AdamW in 8 bits 2; with 16-bit states half")
    return "\n".join(lines)


def beside_prediction(row: Row, module: nn.Module, batch: Any) -> str:
    """A row by hand, term by term with formulas, then beside its prediction; takes no time.

    Args:
        row: with its prediction.
        module: for the number of parameters and the shapes of a transformers model; it may be on "meta".
        batch: of the row's micro-batch.
    """
    prediction = row.prediction
    if prediction is None:
        raise ValueError(f"{row.family} was not predicted: {row.rejected}.")
    counts = ParameterCounts.of(module)
    recipe = _recipe(row, counts, prediction)
    blocks, head = _shapes(module, batch, row, recipe)
    tensors = list(tensors_in([batch]))
    by_hand = closed_form(
        counts, recipe=recipe, blocks=blocks, head=head, inputs_bytes=sum(one.nbytes for one in tensors)
    )
    note = (
        []
        if blocks
        else ["No shapes of blocks are known (no transformers config): activations are predicted only."]
    )
    return "\n".join([str(by_hand), "", str(by_hand.beside(prediction)), *note])


def _recipe(row: Row, counts: ParameterCounts, prediction: Prediction) -> Recipe:
    """As the row trains; of what was given, as the prediction shows it."""
    name = _OF_FAMILY.get(row.family["precision"].name)
    largest = prediction.anatomy.largest
    if name is None:  # as given
        kept = largest.get("weights", 0) / max(1, counts.trained + counts.frozen)
        compensated = largest.get("compensation", 0) > 0
        if kept > 3:
            name = "float32"
        elif compensated:
            compact = largest.get("optimizer_states", 0) <= 5 * counts.trained
            name = "bfloat16, Kahan, compact states" if compact else "bfloat16, split, exact states"
    recipe = Recipe(precision="bf16-true") if name is None else _RECIPES[name]
    moments = round(largest.get("optimizer_states", 0) / max(1, counts.trained) / recipe.state_bytes)
    optimizer = next((known for known in ("adamw", "momentum", "sgd") if MOMENTS[known] == moments), "adamw")
    sums = largest.get("gradients", 0) > 3 * counts.trained and recipe.precision == "bf16-true"
    return Recipe(
        precision=recipe.precision,
        optimizer=optimizer,
        states=recipe.states,
        compensation=recipe.compensation,
        float32_gradients=sums,
    )


def _shapes(
    module: nn.Module, batch: Any, row: Row, recipe: Recipe
) -> tuple[Blocks | None, VocabularyHead | None]:
    """Of a model with a config as the transformers package has them, and a batch with token ids."""
    configs = (getattr(one, "config", None) for one in module.modules())
    config: Any = next((one for one in configs if hasattr(one, "to_dict")), None)
    ids = next((one for one in tensors_in([batch]) if one.dim() == 2 and not one.is_floating_point()), None)
    if config is None or ids is None:
        return None, None
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    if any(
        not getattr(config, name, None)
        for name in ("num_hidden_layers", "hidden_size", "num_attention_heads")
    ):
        return None, None
    return _blocks(config, ids, row, recipe), _head(config, ids)


def _blocks(config: Any, ids: Tensor, row: Row, recipe: Recipe) -> Blocks:
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
        checkpointed=row.family["checkpointing"].name == "full",
    )


def _head(config: Any, ids: Tensor) -> VocabularyHead | None:
    vocabulary = getattr(config, "vocab_size", None)
    return VocabularyHead(tokens=ids.numel(), vocabulary=vocabulary) if vocabulary else None
