"""Terms of a calculation by hand: parameters, what training keeps for each, transformer blocks, logits.

Sources: weights, gradients and states: Rajbhandari et al. 2019 (arXiv:1910.02054). Activations of a
transformer's blocks: Korthikanti et al. 2022 (arXiv:2205.05198), section 4. Attention that saves no scores:
Dao et al. 2022 (arXiv:2205.14135).
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from math import prod
from typing import Any, Literal, get_args

from torch import nn

from lightning_memkit.optim.bytes_per_parameter import BytesPerParameter
from lightning_memkit.optim.modes import Mode, low_dtype_of

Precision = Literal["32-true", "16-mixed", "bf16-mixed", "stored-copies", "16-true", "bf16-true"]

MOMENTS = {"none": 0, "sgd": 0, "momentum": 1, "lion": 1, "rmsprop": 1, "adagrad": 1, "adam": 2, "adamw": 2}
_STATE_BYTES = {"compact": 2, "exact": 4, "8-bit": 1, "8-bit-rows": 1 + 2 / 128}
_WEIGHT_BYTES = {"stored-copies": 6, "16-true": 2, "bf16-true": 2}
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
_ZERO, _REDUCING, _FLASH = "arXiv:1910.02054", "arXiv:2205.05198", "arXiv:2205.14135"


@dataclass(frozen=True, kw_only=True)
class Term:
    """One line of a calculation by hand.

    Attributes:
        category: a key of `lightning_memkit.memory.anatomy.CATEGORIES`, as in a prediction.
        name: what takes the memory.
        formula: the formula for the bytes, with numbers inserted.
        size_bytes: its result.
        source: the source of the formula; empty for plain counting.
    """

    category: str
    name: str
    formula: str
    size_bytes: int
    source: str = ""

    @staticmethod
    def of(
        category: str, name: str, counts: tuple[int, ...], each: float, source: str = "", layers: int = 0
    ) -> "Term":
        """The term for a product of counts, `each` bytes a value; `layers`: how many have it, 0 for none in layers."""
        of_layers = f"{layers} layers × " if layers else ""
        formula = f"{of_layers}{'·'.join(f'{count:,}' for count in counts)} × {each:g}"
        size = round((layers or 1) * prod(counts) * each)
        return Term(category=category, name=name, formula=formula, size_bytes=size, source=source)


@dataclass(frozen=True, kw_only=True)
class ParameterCounts:
    """Counts the values of a model's parameters; a tensor that modules share (tied weights) counts once.

    Args:
        trained: values of parameters that get gradients.
        frozen: values of those that don't.
        embeddings: trained values in embeddings, which keep 32-bit states when others have 8-bit ones.
        cast: trained values that autocast casts: all but those of embeddings and norms. None for all.

    Raises:
        ValueError: a negative number, or more embeddings or cast parameters than trained ones.
    """

    trained: int
    frozen: int = 0
    embeddings: int = 0
    cast: int | None = None

    def __post_init__(self) -> None:
        _refuse_below(self, 0)
        for name in ("embeddings", "cast"):
            count = getattr(self, name) or 0
            if count > self.trained:
                raise ValueError(
                    f"{name}={count} is more than trained={self.trained}: count them in trained, too."
                )

    @staticmethod
    def of(module: nn.Module) -> "ParameterCounts":
        """The counts of a module, which may be on the meta device."""
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        embedded, cast = set[int](), set[int]()
        for owner in module.modules():
            own = {id(parameter) for parameter in owner.parameters(recurse=False)}
            if isinstance(owner, _EMBEDDINGS):
                embedded |= own
            elif "Norm" not in type(owner).__name__:
                cast |= own
        return ParameterCounts(
            trained=sum(parameter.numel() for parameter in trained),
            frozen=sum(one.numel() for one in module.parameters() if not one.requires_grad),
            embeddings=sum(parameter.numel() for parameter in trained if id(parameter) in embedded),
            cast=sum(parameter.numel() for parameter in trained if id(parameter) in cast),
        )


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What training keeps for each parameter.

    The literature's 18 bytes a parameter for mixed precision with AdamW are ``"stored-copies"``: float32
    weights (4), 16-bit copies (2), float32 gradients (4), two moments (8). torch's autocast (``"16-mixed"``,
    ``"bf16-mixed"``) stores no copies: 16 bytes, and 2 for each weight that was cast, while its region lasts
    or the backward needs the cast. Pure bf16 is ``precision="bf16-true"`` with a compensation and
    ``states="compact"`` (10 bytes a parameter) or ``"exact"`` (14).

    Args:
        precision: as in Lightning's `Trainer`, or ``"stored-copies"``.
        optimizer: a key of `MOMENTS`.
        states: ``"plain"``: the weight's dtype, as in torch's optimizers; ``"compact"``: bfloat16; ``"exact"``:
            float32; ``"8-bit"``: bitsandbytes', without its scales (1 in 64), float32 for embeddings;
            ``"8-bit-rows"``: those of ``PureBF16Precision(states="8-bit")``, in rows of a multiple of 128 values.
        compensation: the compensation of bfloat16 weights; see `PureBF16Precision`.
        float32_gradients: whether gradients of 16-bit weights are accumulated in float32.
        frozen_weight_bytes: bytes of a frozen parameter: 4, 2, 1 (8-bit) or 0.5 (4-bit); None: a trained one's.

    Raises:
        ValueError: an option is unknown, or a compensation is given for weights that are not bfloat16.
    """

    precision: Precision = "32-true"
    optimizer: str = "adamw"
    states: Literal["plain", "compact", "exact", "8-bit", "8-bit-rows"] = "plain"
    compensation: Mode = "none"
    float32_gradients: bool = False
    frozen_weight_bytes: float | None = None

    def __post_init__(self) -> None:
        known = {
            "precision": get_args(Precision),
            "optimizer": MOMENTS,
            "states": ("plain", *_STATE_BYTES),
            "compensation": get_args(Mode),
        }
        for name, values in known.items():
            if getattr(self, name) not in values:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} is unknown; write one of {', '.join(values)}."
                )
        if self.compensation != "none" and self.precision != "bf16-true":
            raise ValueError(
                f"compensation={self.compensation!r} is for bfloat16 weights, which precision={self.precision!r} has "
                "not: write precision='bf16-true', or compensation='none'."
            )
        if (frozen := self.frozen_weight_bytes) is not None and frozen <= 0:
            raise ValueError(f"frozen_weight_bytes={frozen} is not positive; write 0.5 for 4 bits.")

    @property
    def state_bytes(self) -> float:
        """Bytes of one moment of one parameter."""
        return _STATE_BYTES.get(self.states, self.gradient_dtype_bytes)

    @property
    def gradient_dtype_bytes(self) -> int:
        """Bytes of one value in the dtype of the gradients."""
        return 2 if self.precision.endswith("-true") and self.precision != "32-true" else 4

    @property
    def per_parameter(self) -> BytesPerParameter:
        """Bytes of each trained parameter; embeddings under 8-bit states take more."""
        return BytesPerParameter(
            weights=_WEIGHT_BYTES.get(self.precision, 4),
            gradients=4 if self.float32_gradients else self.gradient_dtype_bytes,
            states=MOMENTS[self.optimizer] * self.state_bytes,
            compensation=0 if (low := low_dtype_of(self.compensation)) is None else low.itemsize,
        )

    def terms(self, parameters: ParameterCounts) -> Iterator[Term]:
        """Weights, gradients, states, compensation, and autocast's copies."""
        each, trained = self.per_parameter, parameters.trained
        exceptions = parameters.embeddings if self.states == "8-bit" else 0
        frozen_bytes = each.weights if self.frozen_weight_bytes is None else self.frozen_weight_bytes
        cast = trained if parameters.cast is None else parameters.cast
        kept = [
            ("weights", "weights", trained, each.weights),
            ("weights", "frozen weights", parameters.frozen, frozen_bytes),
            ("gradients", "gradients", trained, each.gradients),
            ("optimizer_states", f"states of {self.optimizer}", trained - exceptions, each.states),
            ("optimizer_states", "32-bit states of embeddings", exceptions, 4 * MOMENTS[self.optimizer]),
            ("compensation", "compensation", trained, each.compensation),
        ]
        if self.precision.endswith("-mixed"):
            kept.append(("saved_activations", "autocast's copies of weights", cast, 2))
        for category, name, count, bytes_each in kept:
            yield Term.of(category, name, (count,), bytes_each, _ZERO)


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """A transformer's blocks, and what each saves for the backward.

    In 16 bits, with dropout, unfused attention and a GELU MLP of 4 hidden widths, a layer saves
    s·b·h·(34 + 5·a·s/h) bytes (s tokens a row, b rows, h hidden values, a heads). Of the 34, norms take 4,
    attention 11 and the MLP 19; the 5 are scores after softmax (2), dropout's mask (1) and scores after
    dropout (2). Flash attention saves only one float32 for each row of scores.

    Args:
        layers: the number of blocks.
        hidden: width of the tokens between blocks.
        heads: attention heads.
        length: tokens a row.
        rows: rows of a batch.
        value_bytes: bytes of an activation value.
        mask_bytes: bytes of an element of dropout's mask: 1 on CUDA, `value_bytes` on the CPU, 0 without dropout.
        keeps_scores: whether attention is unfused and saves its scores; False for kernels such as flash attention.
        mlp_width: None for 4 times `hidden`.
        mlp_tensors: tensors of that width that the MLP saves: 2 with GELU (its input and result), 1 with
            ReLU, 4 with SwiGLU.
        checkpointed: whether whole blocks are recomputed in the backward, one at a time, from their inputs.

    Raises:
        ValueError: a size is below 1, or a number of bytes is negative.
    """

    layers: int
    hidden: int
    heads: int
    length: int
    rows: int = 1
    value_bytes: int = 2
    mask_bytes: int = 1
    keeps_scores: bool = True
    mlp_width: int | None = None
    mlp_tensors: int = 2
    checkpointed: bool = False

    def __post_init__(self) -> None:
        _refuse_below(self, 1, but=("mask_bytes", "keeps_scores", "checkpointed"))
        if self.mask_bytes < 0:
            raise ValueError(f"mask_bytes={self.mask_bytes} is negative; write 0 without dropout.")

    def terms(self) -> Iterator[Term]:
        """What the blocks save; with activation checkpointing also what recomputing one block takes."""
        values, layers = (self.length, self.rows, self.hidden), self.layers
        category, block, scores = "saved_activations", "blocks", "attention scores"
        if self.checkpointed:
            yield Term.of(category, "inputs of the blocks", values, self.value_bytes, _REDUCING, layers)
            layers, category, block, scores = 1, "temporaries", "one block recomputed", "its scores"
        width = 4 * self.hidden if self.mlp_width is None else self.mlp_width
        # 8 tensors: inputs of two norms, of the q, k, v projections, of the output projection and of the MLP;
        # q, k and v.
        each = self.value_bytes * (8 + self.mlp_tensors * width / self.hidden) + 2 * self.mask_bytes
        yield Term.of(category, block, values, each, _REDUCING, layers)
        score_rows = (self.heads, self.length, self.rows)
        if self.keeps_scores:
            score = self.value_bytes * (2 if self.mask_bytes else 1) + self.mask_bytes
            yield Term.of(category, scores, (*score_rows, self.length), score, _REDUCING, layers)
        else:
            yield Term.of(category, "sums of scores", score_rows, 4, _FLASH, layers)


@dataclass(frozen=True, kw_only=True)
class VocabularyHead:
    """Logits over a vocabulary, and what cross-entropy computes from them.

    At the beginning of the backward three tensors of tokens · vocabulary values exist: the log-softmax, its
    gradient and the gradient of the logits. In the forward the logits and the log-softmax exist.

    Args:
        tokens: positions that get logits.
        vocabulary: the number of classes.
        value_bytes: bytes of a logit in the loss: 4 even in 16 bits if autocast or the model casts them.

    Raises:
        ValueError: a size is below 1.
    """

    tokens: int
    vocabulary: int
    value_bytes: int = 4

    def __post_init__(self) -> None:
        _refuse_below(self, 1)

    def terms(self) -> Iterator[Term]:
        """What is saved for the backward, and what the backward allocates at its beginning."""
        logits = (self.tokens, self.vocabulary)
        yield Term.of("saved_activations", "log-softmax", logits, self.value_bytes)
        yield Term.of("temporaries", "its gradient", logits, self.value_bytes)
        yield Term.of("temporaries", "gradient of logits", logits, self.value_bytes)


def _refuse_below(given: Any, least: int, but: Iterable[str] = ()) -> None:
    for field in fields(given):
        value = getattr(given, field.name)
        if field.name not in but and value is not None and value < least:
            raise ValueError(
                f"{field.name}={value} of {type(given).__name__} is below {least}, the least it can be."
            )
