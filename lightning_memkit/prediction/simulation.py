"""Count the memory of steps on fake tensors as if they were real."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_map_only
from typing_extensions import Self

from lightning_memkit.memory.anatomy import AnatomyMeter, lasting_bytes
from lightning_memkit.memory.meter import Allocation, Category, Phase, tensors_in
from lightning_memkit.memory.owners import Owners
from lightning_memkit.optim.modes import LOW_STATES
from lightning_memkit.prediction.caching_allocator import replay
from lightning_memkit.prediction.devices import Device
from lightning_memkit.prediction.fakes import Fakes, fake_in_place, taken_as_real
from lightning_memkit.prediction.few_chunks import few_chunks, few_loss_chunks, few_slices
from lightning_memkit.prediction.host_memory import PredictedHostMemory, offloads
from lightning_memkit.prediction.known_values import KnownValues
from lightning_memkit.prediction.own_kernels import without_kernels
from lightning_memkit.prediction.persona import as_on_cuda, steps_as_on_cuda
from lightning_memkit.prediction.recording import counted_random_states, noted_recording
from lightning_memkit.prediction.result import Prediction
from lightning_memkit.prediction.work import WorkLog
from lightning_memkit.prediction.workspaces import MATRIX_PRODUCTS, Workspaces

_DEVICE_OF = torch.ops.prim.device.default
_SHOWN: tuple[Phase, ...] = ("forward", "backward", "optimizer")


class Simulation(AnatomyMeter):
    """Within it operators compute and allocate nothing, but every byte that they would allocate is counted.

    Real tensors that operators meet (the batch, constants) get a fake twin that lives as long as they do.
    Integers keep their values; see `KnownValues`. Forward, backward and the optimizer's step are recognised
    from autograd's state. Costs less than a tenth of a millisecond an operator, whatever the sizes. It changes
    its modules for good, so use it in a fork or on a copy; see `contained`.

    Args:
        device: the device whose choice of kernels is simulated; None for the CPU, whose kernels' workspaces
            are counted, too.
    """

    def __init__(self, device: Device | None = None) -> None:
        super().__init__()
        self._device = device
        self.fakes = Fakes()
        self.values = KnownValues(self._constant, self.fakes.results.run)
        self.workspaces = Workspaces()
        self.work = WorkLog()
        self.host = PredictedHostMemory()
        self._library: dict[bool, Allocation] = {}  # workspaces; True is the backward's thread
        self._parts = 0  # micro-batches of the current step
        self._has_stepped = False
        self.phase_peaks: dict[Phase, int] = {}
        self._parameters: list[Callable[[], Iterable[Tensor]]] = []
        self._owners = Owners()
        self._device_steps = ExitStack()
        self.timeline, self._entered = list[int](), ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(without_kernels(self.work))
            stack.enter_context(noted_recording(self.work))
            stack.enter_context(few_chunks(self.work, self.values))
            stack.enter_context(few_loss_chunks(self.work))
            # Of set-up, a GPU's prediction counts what is left; see `_forget_setup`.
            stack.enter_context(few_slices(1 if self._device is None else 0))
            stack.enter_context(taken_as_real(type(self)))
            if self._device is None:
                stack.enter_context(counted_random_states(self.track))
            else:
                stack.enter_context(as_on_cuda(prefers_cudnn=self._device.prefers_cudnn))
                stack.enter_context(self._device_steps).enter_context(steps_as_on_cuda())
                stack.enter_context(offloads(self.host, self, self.values.assumed))
            stack.enter_context(self.fakes.opened((type(self), self._device and self._device.prefers_cudnn)))
            stack.enter_context(self._owners)
            for handle in self._hooks():
                stack.callback(handle.remove)
            super().__enter__()
            self._entered = stack.pop_all()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._entered.close()

    def take(self, module: nn.Module) -> None:
        """Make a module's parameters and buffers fake, for good, and count their bytes from now on."""
        for twin, original in fake_in_place(module, self.fakes):
            if original.device.type == "cpu" and not original.is_floating_point():
                self.values.know(twin, original)
        self.fakes.forget_storages()
        self.watch(module)

    def watch(self, module: nn.Module) -> None:
        """Register a module's tensors as weights and gradients, and its submodules by their names."""
        self.track([*module.parameters(), *module.buffers()], "weights")
        self._owners.name(module)
        self._parameters = [module.parameters]

    def begin_training(self, module: nn.Module) -> None:
        """End the set-up. A module is built and cast on the host, and moved to a GPU for training."""
        if self._device is not None:
            self._forget_setup()
        self.watch(module)

    def _forget_setup(self) -> None:
        """Keep only allocations that are still alive."""
        self.records = [record for record in self.records if record.died is None]
        self.timeline.clear()
        self.reset_peak()

    def begin_step(self, batch: Iterable[Tensor] = ()) -> None:
        """Begin the step of a batch."""
        if self._has_stepped:  # only the last step's work counts, since the first one creates states
            self._has_stepped, self._parts = False, 0
            self.work.forget()
            self.host.copied_bytes = 0
        self._parts += 1
        self.track([self.twin(tensor, "inputs") for tensor in batch], "inputs")
        self.phase = "forward"

    def begin_optimizer(self) -> None:
        """Begin clipping and the optimizer's step, when gradients are complete."""
        self._mark_gradients()
        self.phase = "optimizer"

    def end_step(self) -> None:
        """End a step."""
        self._mark_gradients()
        self.phase = "outside"

    def mark_states(self, optimizer: Optimizer) -> None:
        """Register an optimizer's states and compensation."""
        for state in optimizer.state.values():
            for name, value in state.items() if isinstance(state, dict) else ():
                category: Category = "compensation" if name in LOW_STATES else "optimizer_states"
                self.track(tensors_in([value]), category)

    def result(self) -> Prediction:
        """The prediction from what was counted."""
        device = self._device
        context_bytes = 0 if device is None else device.context_bytes
        anatomy = self.dissect(gradients=(), optimizer_states=(), fixed_bytes=context_bytes)
        at_peak = [record for record in self.records if record.alive_at(self.peak_tick)]
        saved, held = Counter[str](), Counter[str]()
        for record in at_peak:
            held[record.origin] += record.size_bytes
            if record.category == "saved_activations":
                saved[record.origin] += record.size_bytes
        last = max(at_peak, key=lambda record: record.born, default=None)
        allocations = [*self.records, *self._library.values()]
        reserved = None if device is None else replay(allocations)
        return Prediction(
            anatomy=anatomy,
            phases={phase: self.phase_peaks[phase] for phase in _SHOWN if phase in self.phase_peaks},
            peak_module="" if last is None else last.origin,
            modules=dict(held.most_common()),
            saved=dict(saved.most_common()),
            assumed=dict(self.values.assumed),
            lasting=lasting_bytes(self.records),
            timeline=tuple(self.timeline),
            work=self.work.work(self._parts),
            device="cpu" if device is None else device.name,
            allocated_bytes=0 if reserved is None else reserved.allocated_bytes,
            reserved_bytes=0 if reserved is None else reserved.reserved_bytes,
            library_bytes=sum(workspace.size_bytes for workspace in self._library.values()),
            host_bytes=self.host.peak_bytes,
            offloaded_bytes=self.host.peak_content_bytes,
            offloaded_apart_bytes=self.host.peak_apart_bytes,
            copied_bytes=self.host.copied_bytes // max(1, self._parts),
            expandable_bytes=0 if device is None else replay(allocations, expandable=True).reserved_bytes,
        )

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: torch would wrap `__torch_dispatch__`, which takes time at each call. Nothing compiles meanwhile."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE_OF:  # of a fake tensor; autograd asks more often than operators run
            return args[0].fake_device
        return self._count(func, args, kwargs or {})

    def _count(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if self._sum_is_open:
            self._reach(self.live_bytes)
        if func.namespace != "profiler":  # profiler marks around an optimizer's step would end its phase
            self._turn()
        out = super()._count(func, args, kwargs)
        workspace = 0
        if self._device is None:
            workspace = self.workspaces.of(func, args, kwargs)
        elif func.overloadpacket in MATRIX_PRODUCTS:
            self._open_library(self._device)
        if workspace:
            self._pass_through(workspace, str(func))
        if not self._sum_is_open:  # otherwise autograd frees a summand before anything else happens
            self._reach(self.live_bytes + workspace)
        is_step, key = self.phase == "optimizer", self.fakes.results.key
        self.work.note(func, args, kwargs, out, key=key, of_optimizer=is_step)
        return out

    def _add(self, storage: torch.UntypedStorage, category: Category | None) -> None:
        if not self.host.takes(storage):
            super()._add(storage, category)

    def _open_library(self, device: Device) -> None:
        """Count the matrix library's workspace at its first use in a thread: the forward's, or autograd's."""
        in_backward = torch._C._current_graph_task_id() != -1
        if in_backward not in self._library:
            self._library[in_backward] = Allocation(device.library_bytes, self.clock, self.phase)

    def marking(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function so that its allocations count as saved activations, whenever it runs."""

        def run(*args: Any, **kwargs: Any) -> Any:
            before, self.category = self.category, "saved_activations"
            try:
                return function(*args, **kwargs)
            finally:
                self.category = before

        return run

    def _reach(self, live_bytes: int) -> None:
        self.timeline.append(live_bytes)
        if live_bytes > self.phase_peaks.get(self.phase, 0):
            self.phase_peaks[self.phase] = live_bytes

    def _turn(self) -> None:
        """Determine the phase and the module of the next operator."""
        in_backward = torch._C._current_graph_task_id() != -1
        self.origin = self._owners.current()
        if self.phase == "outside":
            return
        # A module that runs without gradient belongs to the forward, too: chunks, and what asks about them.
        is_forward = torch.is_grad_enabled() or bool(self.origin)
        if in_backward:
            if self.phase != "backward":
                self.end_forward()
        elif self.phase == "backward":
            self._mark_gradients()
            self.phase = "forward" if is_forward else "optimizer"
        elif self.phase == "optimizer" and is_forward:
            self.phase = "forward"

    def _hooks(self) -> Iterator[Any]:
        def before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            if not self._owners.has_names:  # no module was registered: take the weights from the optimizer
                parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
                self.track([self.twin(parameter) for parameter in parameters], "weights")
                self._parameters = [lambda: parameters]
            self._has_stepped = True
            if self.phase in ("forward", "backward") and torch._C._current_graph_task_id() == -1:
                self.begin_optimizer()

        def after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            self.mark_states(optimizer)

        yield register_optimizer_step_pre_hook(before_step)
        yield register_optimizer_step_post_hook(after_step)

    def _mark_gradients(self) -> None:
        found = (parameter.grad for parameters in self._parameters for parameter in parameters())
        self.track((gradient for gradient in found if gradient is not None), "gradients")

    def _call(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        self.fakes.results.key = None  # not every operator comes there
        if not all(type(tensor) is FakeTensor for tensor in tensors_in((args, *kwargs.values()))):
            args, kwargs = tree_map_only(Tensor, self.twin, (tuple(args), kwargs))
        if func.overloadpacket is torch.ops.aten.set_:
            twins = self.fakes.twin_storage  # a tensor may be rebuilt from a storage of the real batch
            args = [twins(one) if isinstance(one, torch.UntypedStorage) else one for one in args]
        return self.values.run(func, args, kwargs)

    def twin(self, real: Tensor, category: Category = "other") -> Tensor:
        """The fake tensor for a real one, while that lives; counted in a category."""
        if isinstance(real, FakeTensor):
            return real
        twin = self.fakes.known_twin(real)
        if twin is None:
            twin = self.fakes.twin(real)
            self.track([twin], category)
            if real.device.type == "cpu":
                self.values.know(twin, real)
        return twin

    def _constant(self, real: Tensor) -> Tensor:
        """The twin of a result that was computed on real tensors."""
        twin = self.fakes.twin(real)
        self.values.know(twin, real)
        return twin
