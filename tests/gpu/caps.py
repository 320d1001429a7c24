"""Run by test_hard_cap.py in a process of its own: what the allocator gives under a cap, and after it."""

import json
import sys

import torch

from lightning_memkit.memory.limits import hard_cap

MIB = 1 << 20


def largest(device: torch.device, top: int) -> int:
    """The largest tensor in whole MiB that the empty allocator gives, up to a size."""
    low, high = 0, top // MIB
    while low < high:
        middle = (low + high + 1) // 2
        torch.cuda.empty_cache()
        try:
            torch.empty(middle * MIB, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError:
            high = middle - 1
        else:
            low = middle
    torch.cuda.empty_cache()
    return low * MIB


def filled(device: torch.device, piece: int) -> tuple[int, int]:
    """What pieces that stay take until there is none more: allocated, and reserved at most."""
    torch.cuda.reset_peak_memory_stats(device)
    pieces = []
    try:
        while True:
            pieces.append(torch.empty(piece, dtype=torch.uint8, device=device))
    except torch.OutOfMemoryError:
        return sum(one.numel() for one in pieces), torch.cuda.max_memory_reserved(device)


def main(budget: int) -> None:
    device = torch.device("cuda", 0)
    undo = hard_cap(device, budget)
    found = {"largest": largest(device, 2 * budget)}
    for piece in (MIB // 2, 2 * MIB, 24 * MIB):  # from segments of 2 MiB, of 20 MiB, of their own
        found[f"filled by {piece}"], found[f"reserved by {piece}"] = filled(device, piece)
        torch.cuda.empty_cache()
    undo()
    found["after"] = largest(device, 2 * budget)
    print(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]))
