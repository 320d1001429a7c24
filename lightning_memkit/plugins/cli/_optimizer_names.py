"""Short names for bitsandbytes' optimizers in a config (`optimizer: AdamW8bit`), without any import."""

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import Namespace

from lightning_memkit.utilities.errors import MissingPackageError

# Names that only bitsandbytes has; plain AdamW remains torch's.
_SHORT = re.compile(
    r"(Paged)?(Adam|AdamW|AdEMAMix|Lion|SGD|RMSprop|Adagrad|LAMB|LARS)(8|32)bit|Paged(Adam|AdamW|AdEMAMix|Lion)"
)
_OPTION = re.compile(r"--([\w.]+)(?:=(.*))?", re.DOTALL)
_CONFIG_FILES = (".yaml", ".yml", ".json")


def classes_named_in(arguments: Any) -> tuple[type, ...]:
    """Import bitsandbytes only if the arguments or their config files name one of its optimizers.

    Args:
        arguments: the words of a command line, or a parsed config; None means the arguments of this process.

    Returns:
        The base class of its optimizers, in which short names are looked up first; empty if none is named.

    Raises:
        MissingPackageError: one is named, and the package is not installed.
    """
    words = sys.argv[1:] if arguments is None else arguments
    found = _in_config(words) if isinstance(words, (Mapping, Namespace)) else _in_words(list(words))
    name = next(found, None)
    if name is None:
        return ()
    try:
        import_module("bitsandbytes")
    except ModuleNotFoundError as error:
        if error.name != "bitsandbytes":
            raise
        raise MissingPackageError("bitsandbytes", f"The optimizer {name}", "bnb") from error
    return (import_module("bitsandbytes.optim.optimizer").Optimizer8bit,)


def _in_words(words: Sequence[str]) -> Iterator[str]:
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if match := _OPTION.fullmatch(word):
            value = following if match[2] is None else match[2]
            yield from _in_value(match[1], value)
        elif word == "-c":
            yield from _in_value("config", following)


def _in_value(option: str, text: str) -> Iterator[str]:
    """The names in an option's value, which is YAML or the path of a YAML file."""
    try:
        text = Path(text).read_text(encoding="utf-8") if text.endswith(_CONFIG_FILES) else text
        value = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return  # the parser reports it
    yield from _in_config({option: value})


def _in_config(config: Any, key: str = "") -> Iterator[str]:
    """Names of bitsandbytes' optimizers anywhere under a key that contains "optimizer"."""
    if isinstance(config, (Mapping, Namespace)):
        items = vars(config) if isinstance(config, Namespace) else config
        for name, value in items.items():
            yield from _in_config(value, f"{key}.{name}")
    elif isinstance(config, (list, tuple)):
        for item in config:
            yield from _in_config(item, key)
    elif isinstance(config, str) and "optimizer" in key:
        if _SHORT.fullmatch(config) or config.startswith("bitsandbytes."):
            yield config
