"""Files as somebody makes them up, or a disk leaves them."""

import random

_MEANT_FOR_HEADERS = (b'"', b"[", b"{", b"9" * 30, b"-", b",", b"\xff")


def spoiled(good: bytes, dice: random.Random, *, heads: bool = False) -> bytes:
    """A few bytes changed, left out or put in; with `heads` every other time among the first 400."""
    content = bytearray(good)
    for _ in range(dice.choice((1, 2, 8))):
        within = min(len(content), dice.choice((len(content), 400))) if heads else len(content)
        place, kind = dice.randrange(within), dice.randrange(3)
        if kind == 0:
            content[place] = dice.randrange(256)
        elif kind == 1:
            del content[place : place + dice.randrange(1, 9)]
        else:
            content[place:place] = dice.choice(_MEANT_FOR_HEADERS)
    return bytes(content)
