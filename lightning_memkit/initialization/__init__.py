"""Build a module on its device at its dtype, with its own initial values or those of files."""

from lightning_memkit.initialization.building import build_empty, build_on
from lightning_memkit.initialization.casting import cast_inputs, cast_module
from lightning_memkit.initialization.loading import LoadedWeights, load_weights
from lightning_memkit.initialization.materialization import materialize

__all__ = [
    "LoadedWeights",
    "build_empty",
    "build_on",
    "cast_inputs",
    "cast_module",
    "load_weights",
    "materialize",
]
