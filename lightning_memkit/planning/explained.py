"""The rules of thumb behind a plan: bytes a parameter, and a configuration computed by hand."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, get_args

from torch import nn

from lightning_memkit.planning.choices import Family, listed
from lightning_memkit.planning.placed import Placement, chunked_head, gathered
from lightning_memkit.planning.problem import ChunkLimits, Row
from lightning_memkit.prediction.by_hand import Blocks, ParameterCounts, Precision, Recipe, VocabularyHead
from lightning_memkit.prediction.closed_form import ClosedForm, closed_form
from lightning_memkit.prediction.result import Prediction
from lightning_memkit.utilities.columns import aligned
from lightning_memkit.utilities.tensors import tensors_of

_pure = partial(Recipe, precision="bf16-true")
# What the table calls it, what it keeps, and the names of the planner's precisions that keep this.
_RECIPES: tuple[tuple[str, Recipe, tuple[str, ...]], ...] = (
    ("float32", Recipe(), ("float32",)),
    ("16-bit mixed, copies stored (the literature's)", Recipe(precision="stored-copies"), ()),
    (
        "16-bit mixed, as autocast does it",
        Recipe(precision="bf16-mixed"),
        ("mixed bfloat16", "mixed float16"),
    ),
    (
        "bfloat16, split, exact states",
        _pure(compensation="split", states="exact"),
        ("bfloat16, exact sums",),
    ),
    ("bfloat16, Kahan, compact states", _pure(compensation="kahan", states="compact"), ("bfloat16, Kahan",)),
    ("bfloat16, Kahan, AdamW8bit of bitsandbytes", _pure(compensation="kahan", states="8-bit"), ()),
    (
        "bfloat16, 24 bits, 8-bit states",
        _pure(compensation="split24", states="8-bit-rows"),
        ("bfloat16, 24 bits",),
    ),
)


def bytes_a_parameter() -> str:
    """A table of what each precision keeps for a parameter, in training with AdamW and in inference."""
    cells: list[tuple[str, ...]] = [
        ("AdamW, bytes a parameter", "weights", "gradients", "states", "compensation", "total")
    ]
    for name, recipe, _ in _RECIPES:
        each = recipe.per_parameter
        figures = (each.weights, each.gradients, each.states, each.compensation, each.total)
        cells.append((name, *(f"{figure:.3g}" for figure in figures)))
    lines = (
        aligned(cells, right=range(1, 6)),
        "autocast adds 2 for each weight that it has cast, while its region lasts",
        "inference: float32 4, 16-bit mixed with stored copies 6, 16 bits 2, 8 bits 1, 4 bits 0.5",
        "states alone: AdamW 8, SGD with momentum 4, AdamW in 8 bits 2; with 16-bit states half",
    )
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
    assert prediction is not None
    counts, placement = ParameterCounts.of(module), Placement.of(row, given)
    recipe = _of_precision(row.family, prediction.anatomy.largest, counts, given)
    if row.family.optimizer is not None:
        recipe = replace(recipe, states="8-bit")
    recipe = _as_predicted(recipe, prediction, counts, placement)
    value_bytes = 4 if recipe.precision == "32-true" else 2
    blocks, head = _shapes(module, batch, value_bytes, placement.policy == "full")
    tensors = {id(one): one for one in tensors_of(batch)}.values()
    plain = closed_form(
        counts,
        recipe=recipe,
        blocks=blocks,
        head=None if placement.is_chunked else head,
        inputs_bytes=sum(one.nbytes for one in tensors),
    )
    terms = [*placement.of_terms(plain.terms, module, blocks.layers if blocks else 0)]
    if placement.stage:
        terms += gathered(module, placement.stage, value_bytes)
    if blocks and head and placement.is_chunked:
        terms += chunked_head(head.tokens, blocks.hidden, head.vocabulary, value_bytes)
    by_hand = ClosedForm(terms=tuple(terms))
    said = [str(by_hand), "", str(by_hand.beside(prediction))]
    if not blocks:
        said.append("No shapes of blocks are known (no transformers config): activations are predicted only.")
    elif row.chunks != ChunkLimits():
        limits = str(row.chunks).removeprefix(", ")
        said.append(f"By hand without {limits}: activations are less as predicted.")
    return "\n".join(said)


def _of_precision(
    family: Family, largest: Mapping[str, int], counts: ParameterCounts, given: Mapping[str, Any]
) -> Recipe:
    """What the row's precision keeps for a parameter; where it is unknown, as wide as predicted weights are."""
    for _, recipe, precisions in _RECIPES:
        if family["precision"].name in precisions:
            return recipe
    for plugin in listed(given.get("plugins")):
        if hasattr(plugin, "compensation"):
            states = "8-bit-rows" if plugin.states == "8-bit" else plugin.states
            return _pure(compensation=plugin.compensation, states=states)
    precision = str(given.get("precision"))
    if precision in get_args(Precision):
        return Recipe(precision=precision)  # pyright: ignore[reportArgumentType]
    weights = largest.get("weights", 0) / max(1, counts.trained + counts.frozen)
    return Recipe() if weights > 3 else _pure()


def _as_predicted(
    recipe: Recipe, prediction: Prediction, counts: ParameterCounts, placement: Placement
) -> Recipe:
    """Complete a recipe by what the prediction shows of the module: its optimizer, gradients in float32."""
    largest = prediction.anatomy.largest
    # FSDP2 accumulates gradients in the dtype of the weights.
    alone = placement.shares == 1 and not placement.is_released and recipe.precision == "bf16-true"
    is_wide = largest.get("gradients", 0) > 3 * counts.trained
    recipe = replace(recipe, float32_gradients=alone and is_wide)
    kept, categories = largest.get("optimizer_states", 0), ["optimizer_states"]
    if placement.states_on_host:
        kept, categories = prediction.offloaded_bytes, ["optimizer_states", "compensation"]

    def away(optimizer: str) -> float:
        form = closed_form(counts, recipe=replace(recipe, optimizer=optimizer))
        return abs(sum(map(form.category_bytes, categories)) / placement.shares - kept)

    return replace(recipe, optimizer=min(("adamw", "momentum", "sgd"), key=away))


def _shapes(
    module: nn.Module, batch: Any, value_bytes: int, checkpointed: bool
) -> tuple[Blocks | None, VocabularyHead | None]:
    """Blocks and head of a model with a transformers config, for a batch with token ids."""
    configs = (getattr(one, "config", None) for one in module.modules())
    config: Any = next((one for one in configs if hasattr(one, "to_dict")), None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    ids = next((one for one in tensors_of(batch) if one.dim() == 2 and not one.is_floating_point()), None)
    needed = ("num_hidden_layers", "hidden_size", "num_attention_heads")
    if ids is None or not all(getattr(config, name, None) for name in needed):
        return None, None
    dropout = any(getattr(config, name, 0) for name in ("hidden_dropout_prob", "resid_pdrop", "dropout"))
    blocks = Blocks(
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        length=ids.shape[1],
        rows=ids.shape[0],
        value_bytes=value_bytes,
        mask_bytes=int(dropout),
        keeps_scores=getattr(config, "_attn_implementation", "") == "eager",
        mlp_width=getattr(config, "intermediate_size", None),
        mlp_tensors=4 if getattr(config, "hidden_act", "") in ("silu", "swish") else 2,
        checkpointed=checkpointed,
    )
    vocabulary = getattr(config, "vocab_size", None)
    head = VocabularyHead(tokens=ids.numel(), vocabulary=vocabulary) if vocabulary else None
    return blocks, head
