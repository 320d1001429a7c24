"""Distinguish an operator that failed from a device that failed with it, on which nothing runs any more."""

import torch

from lightning_memkit.memory.out_of_memory import is_out_of_memory


class DeviceFaultError(RuntimeError):
    """An operator has ended the device's context: until the process ends, whatever runs there fails, too."""


def refuse_if_dead(device: torch.device, error: Exception, during: str, remedy: str) -> None:
    """Raise `DeviceFaultError` if an error has ended an accelerator's context.

    An illegal access, a failed assertion of a kernel or a lost device is reported by every later call, so that the
    operator that caused it is known only now. After any other error (no memory, a refused launch) the device goes on.

    Args:
        device: where the operator ran.
        error: what it raised.
        during: what was done, for the message.
        remedy: what to do instead.

    Raises:
        DeviceFaultError: waiting for the device fails, too.
    """
    if device.type == "cpu":
        return
    try:
        torch.get_device_module(device).synchronize()
    except RuntimeError as lasting:
        if is_out_of_memory(lasting):
            return
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise DeviceFaultError(
            f"{during} has ended the context of {device}: {said} Nothing runs there until this process ends: "
            f"restart it, and {remedy}."
        ) from error
