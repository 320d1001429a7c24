"""LightningCLI that builds models on their device at their dtype, from unchanged YAML."""

import os
import sys
import traceback
from collections.abc import Callable, Mapping
from functools import partial, update_wrapper
from types import MethodType
from typing import Any, NoReturn

from jsonargparse import Namespace
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import (
    LightningArgumentParser,
    LightningCLI,
    _get_module_type,
    _global_add_class_path,
    _InstantiatorFn,
    instantiate_class,
)
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.optim import Optimizer

from lightning_memkit.plugins.callbacks.initial_weights import InitialWeights
from lightning_memkit.plugins.cli._build_target import build_context, refuse_two_precisions, target_device
from lightning_memkit.plugins.cli._config_checkpoint import readable_by_torch
from lightning_memkit.plugins.cli._optimizer_names import classes_named_in
from lightning_memkit.plugins.cli.config_errors import explain, refuse_unrunnable, refused_by_a_class
from lightning_memkit.plugins.strategies._eight_bit import adapt_bitsandbytes_in
from lightning_memkit.plugins.strategies.on_device import add_random_state


class OneLineErrorParser(LightningArgumentParser):
    """Prints the innermost cause of an error on one line; the whole error if `MEMKIT_DEBUG` is set."""

    first_optimizers: tuple[type[Optimizer], ...] = ()

    def add_optimizer_args(
        self,
        optimizer_class: type[Optimizer] | tuple[type[Optimizer], ...] = (Optimizer,),
        nested_key: str = "optimizer",
        link_to: str = "AUTOMATIC",
    ) -> None:
        """Add the options of an optimizer; bare names are looked up in `first_optimizers` first."""
        if optimizer_class == (Optimizer,):
            optimizer_class = (*self.first_optimizers, Optimizer)
        super().add_optimizer_args(optimizer_class, nested_key, link_to)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Print the error and exit with 2; with `exit_on_error=False`, raise it."""
        if not self.exit_on_error:
            super().error(message, ex)
        if os.environ.get("MEMKIT_DEBUG"):
            if ex is not None:
                traceback.print_exception(ex)
            print(message, file=sys.stderr)
        parser = getattr(ex, "subcommand_parser", None) or self
        names = [action.dest for action in parser._actions]
        print(f"memkit: error: {explain(message, names)}", file=sys.stderr)
        self.exit(2)


class MemkitCLI(LightningCLI):
    """LightningCLI that builds the model on its device at its dtype: no float32 copy, under every strategy.

    It takes LightningCLI's arguments and YAML unchanged. What differs:

    - the model of the config is built in `initialization.build_on`, with the dtype of `trainer.precision` or
      of the precision plugin, on the device of this process (its local rank); if `InitialWeights` loads all
      its weights, in `build_empty`;
    - `optimizer` and `lr_scheduler` are built when Lightning asks for them, so they hold the parameters of
      models built in `configure_model`, too;
    - the random state is saved in every checkpoint;
    - memkit's plugins, and bitsandbytes' 8-bit and paged optimizers, can be named without a module path;
      these optimizers keep 32-bit states for embeddings;
    - the saved config of an earlier run in the same folder is overwritten.

    Raises:
        ValueError: both `trainer.precision` and a precision plugin are given.
        ConfigError: a class of the config refuses its options, there are two budgets, or the strategy is unknown; it
            is a subclass of ValueError.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _import_plugins()
        kwargs.setdefault("parser_class", OneLineErrorParser)
        self._first_optimizers = classes_named_in(kwargs.get("args"))
        kwargs["save_config_kwargs"] = {"overwrite": True, **(kwargs.get("save_config_kwargs") or {})}
        super().__init__(*args, **kwargs)

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        """The parser, with the base classes of optimizers that the arguments name."""
        parser = super().init_parser(**kwargs)
        if isinstance(parser, OneLineErrorParser):
            parser.first_optimizers = self._first_optimizers
        return parser

    def before_instantiate_classes(self) -> None:
        """Refuse what can't run before anything is built; subclasses that override this must call it."""
        trainer = self._get(self.config, "trainer", default=Namespace())
        refuse_two_precisions(trainer)
        refuse_unrunnable(trainer)

    def instantiate_classes(self) -> None:
        """Build the classes of the config; an error names the key and the class."""
        try:
            super().instantiate_classes()
        except ValueError as error:
            refused = refused_by_a_class(error, self.config.get(str(self.subcommand), self.config))
            if refused is None:
                raise
            raise refused from error
        device = target_device(self._get(self.config, "trainer", default=Namespace()))
        for callback in self.trainer.callbacks:  # pyright: ignore[reportAttributeAccessIssue]
            if isinstance(callback, InitialWeights):
                callback.load_early(self.trainer, self.model, device)

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """The Trainer of the config, with `RandomState` among its callbacks."""
        trainer = super().instantiate_trainer(**kwargs)
        add_random_state(trainer)
        return trainer

    def _parse_ckpt_path(self) -> None:
        with readable_by_torch(self.config) as path:
            super()._parse_ckpt_path()
        if path is not None:  # parsing replaced `self.config`, so write to the new one
            self.config[self.config.subcommand]["ckpt_path"] = path

    def _add_instantiators(self) -> None:
        super()._add_instantiators()
        trainer = self._get(self.config, "trainer", default=Namespace())
        model_class = _get_module_type(self._model_class)
        # Prepended, so that they take precedence over those that super() added. Modules that are arguments of
        # the model are built before it; the second instantiator covers them.
        self.parser.add_instantiator(
            _OnDeviceInstantiator(self, "model", trainer),
            model_class,
            subclasses=self.subclass_mode_model,
            prepend=True,
        )
        self.parser.add_instantiator(_ModuleInstantiator(trainer), nn.Module, subclasses=True)

    def _add_configure_optimizers_method_to_model(self, subcommand: str | None) -> None:
        parser = self._parser(subcommand)
        optimizers = [key for key, (_, link) in parser._optimizers.items() if link == "AUTOMATIC"]
        schedulers = [key for key, (_, link) in parser._lr_schedulers.items() if link == "AUTOMATIC"]
        if not self.auto_configure_optimizers or len(optimizers) != 1 or len(schedulers) > 1:
            super()._add_configure_optimizers_method_to_model(subcommand)  # no-op, or raises its error
            return
        optimizer = self._class_and_arguments(parser._optimizers, optimizers[0])
        if not optimizer:
            return
        scheduler = self._class_and_arguments(parser._lr_schedulers, schedulers[0]) if schedulers else None
        if is_overridden("configure_optimizers", self.model):
            rank_zero_warn(
                f"{type(self.model).__name__}.configure_optimizers is not used: the config names an optimizer."
            )
        late = partial(
            _configure_late, combine=self.configure_optimizers, optimizer=optimizer, scheduler=scheduler
        )
        update_wrapper(late, self.configure_optimizers)  # Lightning's is_overridden compares __wrapped__ code
        self.model.configure_optimizers = MethodType(late, self.model)

    def _class_and_arguments(self, register: Mapping[str, tuple[Any, str]], key: str) -> Any:
        arguments = self._get(self.config_init, key)
        cls = register[key][0]
        return arguments if isinstance(cls, tuple) else _global_add_class_path(cls, arguments)


class _OnDeviceInstantiator(_InstantiatorFn):
    def __init__(self, cli: LightningCLI, key: str, trainer: Namespace) -> None:
        super().__init__(cli, key)
        self._trainer = trainer

    def __call__(self, class_type: Any, *args: Any, applied_instantiation_links: dict, **kwargs: Any) -> Any:
        with build_context(self._trainer):
            return super().__call__(
                class_type, *args, applied_instantiation_links=applied_instantiation_links, **kwargs
            )


class _ModuleInstantiator:
    def __init__(self, trainer: Namespace) -> None:
        self._trainer = trainer

    def __call__(self, class_type: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with build_context(self._trainer):
            return class_type(*args, **kwargs)


def _configure_late(
    model: LightningModule, combine: Callable[..., Any], optimizer: dict, scheduler: dict | None
) -> Any:
    """The model's `configure_optimizers`: build the optimizer from the model's current parameters."""
    built = instantiate_class(model.parameters(), optimizer)
    adapt_bitsandbytes_in(model, [built])
    schedule = instantiate_class(built, scheduler) if scheduler else None
    return combine(model, optimizer=built, lr_scheduler=schedule)


def _import_plugins() -> None:
    """Import every public plugin: the parser knows only imported classes by their short names."""
    import lightning_memkit

    for name in lightning_memkit.__all__:
        getattr(lightning_memkit, name)
