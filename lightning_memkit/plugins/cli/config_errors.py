"""Condense an error in a config to one line: jsonargparse's own message lists every type that it tried."""

import inspect
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import is_dataclass
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any, get_type_hints

import yaml
from jsonargparse import Namespace
from lightning.pytorch import Callback
from lightning.pytorch.strategies import StrategyRegistry

import lightning_memkit
from lightning_memkit.plugins.asked import splits_batches
from lightning_memkit.plugins.cli._build_target import class_of, entries
from lightning_memkit.plugins.cli._config_places import belongs_elsewhere, nearest_of_ours, takes_classes
from lightning_memkit.utilities.given import no_options, shortened

_UNION = "Does not validate against any of the Union subtypes"
_UNINFORMATIVE = ("Expected a", "Not a valid subclass", "Import path None")
_BUILDERS = ("jsonargparse", "lightning.pytorch.cli", "lightning_memkit.plugins.cli.memkit_cli")
_FORM = "write class_path: NAME and, beside it, init_args: with the options of that class"
_NO_MAPPING = "argument after ** must be a mapping"  # of Python, for an option's place that has a list, say
_FEW_OPTIONS = 12  # with more, the message does not list them; see --help
_MOST_CHARACTERS = 1_000  # of a class's own message


class ConfigError(ValueError):
    """The config can't be run as it is; the message gives the key, the class or value, and the reason."""


def explain(message: str, names: Iterable[str] = ()) -> str:
    """The innermost cause of a jsonargparse error, on one line.

    Args:
        message: the message of a parser's error.
        names: the full names of the parser's options, from which a replacement for an unknown one is
            suggested.
    """
    return " ".join(f"{_unparsable(message)}{_cause(message.strip(), tuple(names))}".split())


def _unparsable(message: str) -> str:
    """The config of the command line that is no YAML, which jsonargparse does not name."""
    if not message.startswith("Problems parsing config"):
        return ""
    given = [word.partition("=")[2] or word for word in sys.argv[1:] if word != "--config"]
    for path in (Path(word) for word in given if Path(word).is_file()):
        try:
            yaml.safe_load(path.read_bytes())
        except yaml.YAMLError:
            return f"{path}: "
    return ""


def refused_by_a_class(error: Exception, config: Mapping[str, Any]) -> ConfigError | None:
    """The error of a constructor that jsonargparse has wrapped, with its key; None for every other error.

    Args:
        error: what building the classes of a config raised.
        config: the parsed config, searched for the key of the class.
    """
    if not str(error).startswith(_UNION):
        return None
    cause = _innermost(error)
    if _NO_MAPPING in str(cause) and (group := next(_groups_without_options(config), None)):
        return ConfigError(group)
    refused = _class_built_in(cause.__traceback__)
    if cause is error or refused is None:
        return ConfigError(explain(str(error)))
    where = next(_places(config, refused), refused.__qualname__)
    kind = "" if isinstance(cause, ValueError) else f"{type(cause).__name__}: "
    return ConfigError(_at_most(" ".join(f"{where}: {kind}{cause}".split())))


def refuse_unrunnable(trainer: Namespace) -> None:
    """Refuse a `trainer` section that Lightning would refuse later, or in words that don't say what to write.

    Raises:
        ConfigError: the strategy has an unknown name, or two callbacks run batches in micro-batches.
    """
    strategy = trainer.get("strategy")
    known = StrategyRegistry.available_strategies()
    if isinstance(strategy, str) and strategy != "auto" and strategy not in known:
        plain = sorted(name for name in known if "_" not in name.removeprefix("memkit_"))
        raise ConfigError(
            f"trainer.strategy={strategy!r} is no strategy{_meant(strategy, known)}; there are {', '.join(plain)}, "
            "and their variants."
        )
    budgets = budgets_in(trainer)
    if len(budgets) > 1:
        raise ConfigError(
            f"trainer.callbacks has {len(budgets)} of {budgets[0]}, and a run has one budget: remove all but one."
        )


def budgets_in(trainer: Namespace) -> list[str]:
    """The classes of a `trainer` section's callbacks that run batches in micro-batches within a budget."""
    return [one.class_path for one in entries(trainer, "callbacks") if splits_batches(class_of(one))]


def _cause(text: str, names: tuple[str, ...] = (), key: str = "") -> str:
    if match := re.match(r'Parser key "([^"]+)"(?: element \d+)?:\s*', text):
        return f"{match[1]}: {_cause(_dedented(text[match.end() :]), key=match[1])}"
    if text.startswith(_UNION):
        return _cause_in_union(text, key)
    if text == "Unexpected config:":
        return "the config is empty: it names a model, data and the trainer's options; --print_config prints all keys"
    if match := re.fullmatch(r"Import path (\S+) does not correspond to a subclass of \w+", text):
        return belongs_elsewhere(key, match[1], _imported(match[1])) or text
    if match := re.match(r"Problem with given class_path '([^']+)':\s*", text):
        return _cause_in_class(match[1], _dedented(text[match.end() :]))
    if match := re.fullmatch(r"Subcommand '\w+' does not accept option '([^']+)'", text):
        group, _, _ = match[1].rpartition(".")
        said = _unknown(match[1], [name for name in names if name.startswith(group)], list_them=False)
        return said if said.endswith(")") else f"{said}{_owners(match[1].rpartition('.')[2])}"
    if match := re.fullmatch(r"Expected an? (.+?)\. Got value: (.*)", text, re.DOTALL):
        return f"{match[2]!r} is none of: {_plain(match[1])}{_remedy(key, match[2], match[1])}"
    return text


def _cause_in_union(text: str, key: str = "") -> str:
    """The most informative of a union's errors; if none is, the value and the types that it could have."""
    errors = re.search(r"\nErrors:\n(.*)\nGiven value type:", text, re.DOTALL)
    causes = [_dedented(part) for part in re.split(r"(?:^|\n)  - ", errors[1])[1:]] if errors else []
    telling = [cause for cause in causes if not cause.startswith(_UNINFORMATIVE)]
    if telling:
        return _cause(telling[0], key=key)
    types = re.search(r"\nSubtypes: \[(.*)\]\n", text)
    value = re.search(r"\nGiven value: (.*)", text, re.DOTALL)
    if value and (bare := _bare_class(key, value[1])):
        return bare
    given, known = value[1] if value else "the value", _plain(types[1]) if types else "the types"
    return f"{given} is none of: {known}{_remedy(key, given, known)}"


def _remedy(key: str, value: str, types: str) -> str:
    """What to write in the place of a value of the wrong type, where it can be told."""
    if key.rpartition(".")[2] == "budget":
        return '; write a size such as 22GiB, a fraction such as 0.9 or 90%, or "auto"'
    if value.startswith("[") and not re.search("list|sequence|tuple|iterable", types, re.IGNORECASE):
        return "; write one value, without the brackets"
    return ""


def _bare_class(key: str, value: str) -> str:
    """What to write in the place of a class's bare name that this key does not take; empty if it is none of ours."""
    for name in re.findall(r"[\w.]+", value) if takes_classes(key) else ():
        if path := nearest_of_ours(name):
            place = belongs_elsewhere(key, path, _imported(path))
            return place or f"{name!r} is no entry; write - class_path: {path}"
    return ""


def _cause_in_class(path: str, text: str) -> str:
    cls = _imported(path)
    if match := re.fullmatch(r"Option '([^']+)' is not accepted", text):
        if cls is not None and not _options(cls):  # a base class, for which such an entry was taken
            return f"an entry with {match[1]!r} is not formed as one: {_FORM}"
        return _unknown(match[1], _options(cls), owner=path)
    if match := re.fullmatch(r"Group '([^']+)' does not accept option '([^']+)'", text):
        return _unknown(match[2], _options(_hints(cls).get(match[1])), owner=f"{match[1]} of {path}")
    if match := re.match(r"Parser key \"([^\"]+)\":\s*Unable to load config (.*)", text):
        return f"{path}: {no_options(match[1], match[2], _options(_hints(cls).get(match[1])) or ['option'])}"
    name = path.rpartition(".")[2]
    if cls is None and path.startswith("lightning_memkit.") and name in lightning_memkit.__all__:
        return f"{path}: {text}; write lightning_memkit.{name}, which stays where it is"
    if cls is None and (meant := nearest_of_ours(path) if path.startswith("lightning_memkit.") else ""):
        return f"{path}: lightning_memkit has no {name} (did you mean {meant}?)"
    if match := re.fullmatch(r"module '([^']+)' has no attribute '([^']+)'", text):
        return f"{path}: {text}{_meant(match[2], dir(sys.modules.get(match[1])))}"
    if re.fullmatch(r"No module named '[^']+'", text):
        return f"{path}: {text}; your own classes are looked for in the folder that memkit is started in"
    return f"{path}: {_cause(text)}"


def _unknown(option: str, known: list[str], *, owner: str = "the config", list_them: bool = True) -> str:
    accepts = f"; it accepts {', '.join(known)}" if list_them and 0 < len(known) <= _FEW_OPTIONS else ""
    return f"{owner} has no option {option!r}{accepts}{_meant(option, known)}"


def _meant(written: str, known: Iterable[str]) -> str:
    """A question for the known name that is most like what was written; empty if none is."""
    group, _, last = written.rpartition(".")  # the group is as written: its letters would make any key near
    of_group = {name.rpartition(".")[2]: name for name in known if name.rpartition(".")[0] == group}
    close = get_close_matches(last, list(of_group), n=1)
    return f" (did you mean {of_group[close[0]]!r}?)" if close else ""


def _owners(option: str) -> str:
    """Which of our callbacks has this option; where none or several have it, where options are listed."""
    ours = [getattr(lightning_memkit, name) for name in lightning_memkit.__all__]
    callbacks = [one for one in ours if inspect.isclass(one) and issubclass(one, Callback)]
    found = [one.__name__ for one in callbacks if option in _options(one)]
    if len(found) == 1:
        return f"; {found[0]} has it, under trainer.callbacks"
    return "; --help lists what there is"


def _options(cls: Any) -> list[str]:
    if not callable(cls):
        return []
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [name for name, given in inspect.signature(cls).parameters.items() if given.kind not in variadic]


def _hints(cls: Any) -> dict[str, Any]:
    try:
        return get_type_hints(getattr(cls, "__init__", cls))
    except (NameError, TypeError):  # annotations that can only be resolved by type checkers
        return {}


def _imported(path: str) -> Any:
    module, _, name = path.rpartition(".")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError):
        return None


def _innermost(error: BaseException) -> BaseException:
    # Follow only jsonargparse's own chain: a constructor's error is final, even if raised `from` another.
    while str(error).startswith(_UNION) and error.__cause__ is not None:
        error = error.__cause__
    return error


def _class_built_in(trace: TracebackType | None) -> type | None:
    """The class whose constructor raised: the outermost one below the frames that build the config."""
    while trace is not None:
        frame = trace.tb_frame
        builds = str(frame.f_globals.get("__name__")).startswith(_BUILDERS)
        if frame.f_code.co_name == "__init__" and "self" in frame.f_locals and not builds:
            return type(frame.f_locals["self"])
        trace = trace.tb_next
    return None


def _classes(config: Any, key: str = "") -> Iterator[tuple[str, str, Any]]:
    """The key, path and arguments of every class of a config, in order; items of a list share the list's key."""
    if isinstance(config, (list, tuple)):
        for item in config:
            yield from _classes(item, key)
    elif isinstance(config, (Namespace, dict)):
        items = vars(config) if isinstance(config, Namespace) else config
        if isinstance(items.get("class_path"), str):
            yield key, items["class_path"], items.get("init_args") or {}
        for name, value in items.items():
            inner = name if not key else key if name == "init_args" else f"{key}.{name}"
            yield from _classes(value, inner)


def _places(config: Any, refused: type) -> Iterator[str]:
    """The keys at which a class occurs in a config: as a class path, or as the type of an option."""
    for key, path, _ in _classes(config):
        cls = _imported(path)
        if cls is refused:
            yield f"{key}: {path}"
        yield from (f"{key}: {path}: {option}" for option, hint in _hints(cls).items() if hint is refused)


def _groups_without_options(config: Any) -> Iterator[str]:
    """What to write where an option's place in a config has a value and no mapping, which jsonargparse lets pass."""
    for key, path, given in _classes(config):
        for option, hint in _hints(_imported(path)).items():
            value = given.get(option, hint)
            if is_dataclass(hint) and value is not hint and not isinstance(value, (Namespace, Mapping)):
                yield f"{key}: {path}: {no_options(option, shortened(value), _options(hint))}"


def _at_most(text: str, characters: int = _MOST_CHARACTERS) -> str:
    """The beginning of a text: for an unknown model_type, transformers lists the names of all models."""
    if len(text) <= characters:
        return text
    return (
        f"{text[:characters].rstrip()} ... ({len(text) - characters:,} more characters: --debug prints them)"
    )


def _dedented(text: str) -> str:
    return inspect.cleandoc(text).strip()


def _plain(types: str) -> str:
    """Shorten `<class 'a.b.C'>` and `a.b.C` to `C`."""
    types = re.sub(r"<class '([^']+)'>", r"\1", types).replace("NoneType", "null")
    return re.sub(r"\b(?:[a-zA-Z_]\w*\.)+([A-Za-z_]\w*)", r"\1", types)
