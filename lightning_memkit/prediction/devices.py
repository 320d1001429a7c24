"""The devices that names mean, as drivers and people write them."""

import re
from dataclasses import replace
from difflib import SequenceMatcher

import torch

from lightning_memkit.memory.units import format_bytes, parse_bytes
from lightning_memkit.prediction.data_sheets import DEVICES
from lightning_memkit.prediction.device import Device

_GIB = 1 << 30
# Words that tell makers and form factors, and no other rates.
_IDLE = re.compile(
    r"nvidia|amd|geforce|instinct|tesla|quadro|radeon|graphics|gpu|card|generation|blackwell|workstation|edition|"
    r"founders|sxm\d?|oam|hbm\d?e?|ac|mig.*"
)
_LAPTOP = re.compile(r"laptop|mobile|notebook|max ?q|(?<=\d)m\b")  # another chip under a desktop card's name
_MEMORY = re.compile(r"\b(\d+) ?gi?b?\b")
_HOSTS_MEMORY = re.compile(r"(?<=gh200 )(120|480) ?gb\b")  # in the driver's name of a Grace Hopper
_HERE = re.compile(r"(cuda|gpu)(?::(\d+))?")
_COUNTED = re.compile(
    r"\d{1,3}(?:\s*[x×*]\s*|\s+)(?P<after>[a-z].*|\d{4}.*)|(?P<before>.*\d.*?)\s*[x×*]\s*\d{1,3}"
)
_SPLIT = re.compile(r"[,;+&]| and ")
_ONE_BOARD = 100e9  # without NVLink of so many bytes a second there is only the PCIe board
_LIKE_LETTERS = 0.65
# What people call by one name.
_ALSO = {"6000": ("rtx6000ada", "a6000", "rtxpro6000")}


def device_named(device: "str | Device", memory: int | str | None = None) -> Device:
    """The known device that a name means ("RTX 4090", "NVIDIA H100 80GB HBM3"), or the given `Device`.

    Args:
        device: the name, or the device; "cuda", "cuda:1" or "gpu" for one of this machine's.
        memory: in the place of its own, as a size.

    Raises:
        ValueError: the name is unknown, or several have it, or it means a card that is not here.
    """
    found = device if isinstance(device, Device) else card_here(device) or _named(device)
    return found if memory is None else replace(found, memory_bytes=parse_bytes(memory))


def means_here(device: "str | Device") -> bool:
    """Whether a name means a device of this machine: "auto", "cuda", "cuda:1", "gpu"."""
    return isinstance(device, str) and (
        _plain(device) == "auto" or _HERE.fullmatch(device.strip().lower()) is not None
    )


def card_here(device: str) -> Device | None:
    """The card of this machine that "cuda", "cuda:1" or "gpu" means; None for every other name.

    Raises:
        ValueError: it is not here.
    """
    named = _HERE.fullmatch(device.strip().lower())
    if named is None:
        return None
    index, count = int(named[2] or 0), torch.cuda.device_count() if torch.cuda.is_available() else 0
    if index >= count:
        raise ValueError(
            f"device={device!r} is a GPU of this machine, and torch sees {count or 'none'} here; write device='cpu', "
            "or the name of a card that need not be here, such as 'rtx4090'."
        )
    return gpu_here(index)


def gpu_here(index: int = 0) -> Device:
    """A GPU of this machine, with the data sheet of its name or of the most similar known one."""
    properties = torch.cuda.get_device_properties(index)
    found = most_like(properties.name, properties.total_memory)
    if found.rates_of and getattr(properties, "major", 8) < 8:  # bfloat16 came with compute capability 8.0
        return replace(found, has_bfloat16=False)
    return found


def _named(device: str) -> Device:
    known = DEVICES.get(device.lower())
    found = devices_meant(device) if known is None else [known]
    found = found or [DEVICES[name] for name in _ALSO.get(_compact(device), ())]
    if len(found) > 1:
        names = " or ".join(one.name for one in found)
        raise ValueError(f"device={device!r} may be {names}: write which, since their memory differs.")
    if not found:
        raise ValueError(_refusal(device))
    return found[0]


def _refusal(device: str) -> str:
    """Why a name means no known device, and what to write."""
    said = f"device={device!r}"
    one = _one_of_several(device)
    if one:
        return (
            f"{said} names several cards; write one, device={one!r}: how many train is the Trainer's devices "
            "(--trainer.devices 8, in code trainer={'devices': 8})."
        )
    by_memory = (
        "give its memory as well (--memory 24GiB), or describe it: "
        "Device(name=, memory_bytes=, flops_16=, ...)"
    )
    if _plain(device) in ("mps", "metal"):
        return (
            f"{said}: a Mac's GPU shares the host's memory and has no data sheet here; plan for device='cpu', or "
            f"{by_memory}."
        )
    if _LAPTOP.search(_plain(device)):
        return f"{said} is a laptop's or a Max-Q chip, slower than the desktop card of its name: {by_memory}."
    other = [one for one in DEVICES.values() if _model(one.name) == _compact(device)]
    if other:
        sizes = " or ".join(format_bytes(one.memory_bytes) for one in other)
        return (
            f"{said} has another memory than {other[0].name.partition('-')[0]}'s {sizes}: write the name without it, "
            "or --memory SIZE beside the name."
        )
    return (
        f"{said} is unknown{_slip(device)}; `memkit plan --help` lists those known. For another {by_memory}."
    )


def _one_of_several(device: str) -> str:
    """One card of those that a name counts or lists ("8xh100", "h100,h100"); empty if it names one."""
    text = device.strip()
    counted = _COUNTED.fullmatch(text.lower())
    listed = [part.strip() for part in _SPLIT.split(text) if part.strip()]
    return (counted["after"] or counted["before"]) if counted else listed[0] if len(listed) > 1 else ""


def _slip(device: str) -> str:
    """A question for the known name with the same numbers and nearly the same letters; empty if there is none."""
    written, numbers = _compact(device), re.findall(r"\d+", _compact(device))
    close = [
        (likeness, name)
        for name in DEVICES
        for model in (name.partition("-")[0], _model(name))
        if numbers and re.findall(r"\d+", model) == numbers
        for likeness in (SequenceMatcher(None, _letters(written), _letters(model)).ratio(),)
        if likeness >= _LIKE_LETTERS
    ]
    return f" (did you mean {max(close)[1]!r}?)" if close else ""


def _letters(name: str) -> str:
    return re.sub(r"\d+", "", name)


def described(device: str, memory: int | str | None) -> "str | Device":
    """What `Budget` takes for a device and its memory as they were written; without a memory the device's name.

    Args:
        device: a name, known or not; "auto" for a card of which nothing but its memory is known.
        memory: as a size. A known device keeps its speed; an unknown one has rates and abilities of the known one
            with bfloat16 whose memory is nearest, so that its times are rough.

    Raises:
        ValueError: the memory is no size, or belongs to a CPU; or the name lists several devices.
    """
    if memory is None:
        return device
    if device == "cpu":
        raise ValueError(
            f"memory={memory!r} is a card's, and device='cpu' has the host's: give a budget instead."
        )
    if _one_of_several(device):
        raise ValueError(_refusal(device))
    size = parse_bytes(memory)
    if not means_here(device) and len(devices_meant(device)) == 1:
        return device_named(device, size)
    return replace(_nearest(size), name=f"a card of {format_bytes(size)}" if means_here(device) else device)


def devices_meant(words: str) -> list[Device]:
    """The known devices that a driver's or a person's words mean: "NVIDIA A100-SXM4-80GB", "A100", "4090".

    Variants of a chip with other rates ("RTX 4090 Laptop", "H800 PCIe") mean none.
    """
    plain, compact = _plain(words), _compact(words)
    if _LAPTOP.search(plain) or _one_of_several(words):
        return []
    found = [one for one in DEVICES.values() if _model(one.name) == compact]
    if not found and "pcie" in compact:
        found = [
            one
            for one in DEVICES.values()
            if _has_one_board(one) and _model(one.name) == compact.replace("pcie", "")
        ]
    sizes = [int(size) for size in _MEMORY.findall(plain)]
    return [one for one in found if not sizes or any(_has_about(one, size) for size in sizes)]


def most_like(name: str, memory_bytes: int) -> Device:
    """The data sheet of a driver's name, or of the most similar known device; with that memory.

    Similar is the longest known name within it ("NVIDIA GeForce RTX 4090 Laptop GPU"), else the known device with
    bfloat16 whose memory is nearest.
    """
    meant = devices_meant(name) or _within(name)
    if not meant:
        return _nearest(memory_bytes)
    nearest = min(meant, key=lambda one: abs(one.memory_bytes - memory_bytes))
    return replace(nearest, memory_bytes=memory_bytes)


def _nearest(memory_bytes: int) -> Device:
    """The device with bfloat16, as every card since 2020, whose memory is nearest; of several the slowest."""
    modern = [one for one in DEVICES.values() if one.has_bfloat16]
    nearest = min(modern, key=lambda one: (abs(one.memory_bytes - memory_bytes), one.flops_16))
    return replace(nearest, memory_bytes=memory_bytes, rates_of=nearest.name)


def _within(name: str) -> list[Device]:
    """The devices with the longest name that a driver's name contains."""
    compact, found = _compact(name), dict[int, list[Device]]()
    for one in DEVICES.values():
        model = _model(one.name)
        before = r"(?<![a-z])" if model[0].isalpha() else r"(?<!\d)"
        if re.search(rf"{before}{model}(?!\d)", compact):
            found.setdefault(len(model), []).append(one)
    return found[max(found)] if found else []


def _has_one_board(device: Device) -> bool:
    return device.link_bytes_per_second < _ONE_BOARD or device.flops_16 == DEVICES["a100-80gb"].flops_16


def _has_about(device: Device, gigabytes: int) -> bool:
    """Whether that is what people call its memory: a driver reports up to 7 % less, or GiB for GB."""
    return 0.93 * gigabytes * 10**9 <= device.memory_bytes <= 1.04 * gigabytes * _GIB


def _plain(words: str) -> str:
    return _HOSTS_MEMORY.sub("", re.sub(r"[^a-z0-9]+", " ", words.lower())).strip()


def _compact(words: str) -> str:
    """The words without memory, makers and spaces: "NVIDIA GeForce RTX 4070 Ti 12GB" is "4070ti"."""
    kept = _MEMORY.sub("", re.sub(r"\bmig\b.*", "", _plain(words)))
    return re.sub(r"^(rtx|gtx)", "", "".join(word for word in kept.split() if not _IDLE.fullmatch(word)))


def _model(name: str) -> str:
    """A known name without its memory, as `_compact` has it."""
    return re.sub(r"^(rtx|gtx)", "", name.partition("-")[0])
