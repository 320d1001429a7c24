"""Operators of a simulation that are no part of what is predicted."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from lightning_memkit.prediction.simulation import Simulation


@contextmanager
def uncounted() -> Iterator[None]:
    """Within the context, a simulation that is active counts nothing but what is still alive at the end."""
    modes = _get_current_dispatch_mode_stack()
    simulation = next((mode for mode in modes if isinstance(mode, Simulation)), None)
    if simulation is None:
        yield
        return
    peak = simulation.peak_bytes, simulation.peak_tick, simulation.peak_operator, simulation.peak_origin
    phases, operators = dict(simulation.phase_peaks), len(simulation.timeline)
    recorded = len(simulation.records)
    try:
        yield
    finally:
        simulation.peak_bytes, simulation.peak_tick, simulation.peak_operator, simulation.peak_origin = peak
        simulation.phase_peaks = phases
        del simulation.timeline[operators:]
        kept = [record for record in simulation.records[recorded:] if record.died is None]
        simulation.records[recorded:] = kept
