"""transformers' `from_pretrained` within a prediction: the model of the config alone, since nothing has values."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def without_reading_weights() -> Iterator[None]:
    """Within it `from_pretrained` builds what it would have loaded, in eval mode as ever; quantized models are read.

    Loading opens files in threads of its own, which see neither fake tensors nor the target dtype of a build.
    """
    if not sys.modules.keys() & {"transformers.modeling_utils", "transformers.models.auto"}:
        yield  # no class is known yet that has it
        return
    from transformers.modeling_utils import PreTrainedModel

    base: Any = PreTrainedModel
    plain = base.__dict__["from_pretrained"]

    def from_pretrained(cls: Any, name: Any = None, *inputs: Any, config: Any = None, **options: Any) -> Any:
        if not hasattr(config, "to_dict"):
            kept = {key: options.pop(key) for key in ("dtype", "torch_dtype") if key in options}
            config, options = cls.config_class.from_pretrained(
                name if config is None else config, return_unused_kwargs=True, **options
            )
            options.update(kept)
        if options.get("quantization_config") or getattr(config, "quantization_config", None):
            return plain.__func__(cls, name, *inputs, config=config, **options)
        dtype = options.get("dtype", options.get("torch_dtype", "auto"))
        taken = {key: options[key] for key in ("attn_implementation",) if key in options}
        return cls._from_config(
            config, dtype=config.dtype if dtype in ("auto", None) else dtype, **taken
        ).eval()

    base.from_pretrained = classmethod(from_pretrained)
    try:
        yield
    finally:
        base.from_pretrained = plain
