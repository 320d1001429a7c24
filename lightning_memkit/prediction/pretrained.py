"""transformers' `from_pretrained` in a prediction: builds the model from its config, reads no weights."""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_HOLDS_IT = "transformers.modeling_utils"


@contextmanager
def without_reading_weights() -> Iterator[None]:
    """Build what `from_pretrained` would load, without reading weights; quantized models are still read.

    Loading would open files in threads of its own, which don't see the fake tensor mode or the dtype of a
    build. The model is in eval mode as usual. transformers is not imported for this, which takes a second; if
    a model imports it later, it is patched then.
    """
    with ExitStack() as undo:

        def patch(module: ModuleType) -> None:
            undo.callback(_patched(module.PreTrainedModel))

        if _HOLDS_IT in sys.modules:
            patch(sys.modules[_HOLDS_IT])
        else:
            finder = _Importing(_HOLDS_IT, patch)
            sys.meta_path.insert(0, finder)
            undo.callback(sys.meta_path.remove, finder)
        yield


class _Importing(MetaPathFinder):
    """Calls a function once a module has been imported."""

    def __init__(self, name: str, imported: Callable[[ModuleType], None]) -> None:
        self._name, self._imported = name, imported

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """The module's own spec, whose loader then calls the function."""
        spec = PathFinder.find_spec(fullname, path, target) if fullname == self._name else None
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def executed(module: ModuleType) -> None:
                execute(module)
                self._imported(module)

            spec.loader.exec_module = executed
        return spec


def _patched(base: Any) -> Callable[[], None]:
    """Make a class build from configs; returns the undo."""
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
    return lambda: setattr(base, "from_pretrained", plain)
