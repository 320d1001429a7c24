"""Hooks that autograd calls when a parameter's gradient is complete."""

from collections.abc import Callable
from weakref import WeakMethod as WeakBound

from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle


class GradientHooks:
    """One hook on each trainable parameter of an optimizer; it does not keep its method's object alive."""

    def __init__(self, act: Callable[[Parameter], None]) -> None:
        self._act = WeakBound(act)
        self._handles: dict[Parameter, RemovableHandle] = {}

    def __contains__(self, parameter: Parameter) -> bool:
        return parameter in self._handles

    def attach(self, optimizer: Optimizer) -> None:
        """Hook parameters that were added or unfrozen since."""
        known = set(map(id, self._handles))
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in known and parameter.requires_grad:
                    self._hook(parameter)

    def put_last(self) -> None:
        """Run after hooks that others have added since: these may change the gradient."""
        for parameter, handle in self._handles.items():
            hooks = handle.hooks_dict_ref()
            if hooks is not None and len(hooks) > 1 and next(reversed(hooks)) != handle.id:
                handle.remove()
                self._hook(parameter)

    def remove(self) -> None:
        """Remove all hooks."""
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()

    def _hook(self, parameter: Parameter) -> None:
        weak = self._act

        def hook(parameter: Parameter) -> None:
            act = weak()
            if act is not None:
                act(parameter)

        self._handles[parameter] = parameter.register_post_accumulate_grad_hook(hook)
