"""Hooks that autograd calls when a parameter's gradient is complete."""

from collections.abc import Callable
from typing import Generic, TypeVar
from weakref import ref

from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

Owner = TypeVar("Owner")


class GradientHooks(Generic[Owner]):
    """One hook on each trainable parameter of an optimizer; it does not keep its method's object alive.

    Args:
        owner: has the method.
        act: the method, unbound: a weak bound method would make one for each gradient.
    """

    def __init__(self, owner: Owner, act: Callable[[Owner, Parameter], None]) -> None:
        self._owner, self._act = ref(owner), act
        self._handles: dict[Parameter, RemovableHandle] = {}
        self._known: set[int] = set()  # ids of the hooked, which the handles keep alive

    def __contains__(self, parameter: Parameter) -> bool:
        return parameter in self._handles

    def attach(self, optimizer: Optimizer) -> None:
        """Hook parameters that were added or unfrozen since."""
        for group in optimizer.param_groups:
            if self._known.issuperset(map(id, group["params"])):
                continue
            for parameter in group["params"]:
                if id(parameter) not in self._known and parameter.requires_grad:
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
        self._known.clear()

    def _hook(self, parameter: Parameter) -> None:
        weak, act = self._owner, self._act

        def hook(parameter: Parameter) -> None:
            owner = weak()
            if owner is not None:
                act(owner, parameter)

        self._known.add(id(parameter))
        self._handles[parameter] = parameter.register_post_accumulate_grad_hook(hook)
