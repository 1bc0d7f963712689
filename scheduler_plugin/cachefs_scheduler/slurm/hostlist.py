"""Slurm's host lists: `n[1-3,7],login`, `rack[1-2]n[01-16]`."""

import re
from itertools import product
from typing import Final

MAX_NAMES: Final = 65536
_GROUP: Final = re.compile(r"\[([^\[\]]*)\]")
_RANGE: Final = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")


def expand_hostlist(hostlist: str) -> list[str]:
    """Return the names, in their order. Raises ValueError for an invalid list, or more than MAX_NAMES."""
    found: list[str] = []
    for word in _split_hostlist(hostlist):
        # Even positions are plain text, odd ones the contents of brackets.
        pieces = _GROUP.split(word)
        choices = [_expand_brackets(piece) if place % 2 else [piece] for place, piece in enumerate(pieces)]
        size = 1
        for choice in choices:
            size *= len(choice)
        if size + len(found) > MAX_NAMES or any("[" in text or "]" in text for text in pieces[::2]):
            raise ValueError(f"no list of nodes: {hostlist[:80]}")
        found.extend("".join(chosen) for chosen in product(*choices))
    return found


def _split_hostlist(hostlist: str) -> list[str]:
    """Split at commas outside of brackets."""
    words, depth, start = [], 0, 0
    for place, letter in enumerate(hostlist):
        if letter == "," and depth == 0:
            words.append(hostlist[start:place])
            start = place + 1
        depth += (letter == "[") - (letter == "]")
    words.append(hostlist[start:])
    return [word for word in words if word]


def _expand_brackets(inside: str) -> list[str]:
    found: list[str] = []
    for part in inside.split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise ValueError(f"no range of nodes: [{inside[:80]}]")
        first, last = match[1], match[2] or match[1]
        if not 0 <= int(last) - int(first) < MAX_NAMES:
            raise ValueError(f"no range of nodes: [{inside[:80]}]")
        found.extend(str(number).zfill(len(first)) for number in range(int(first), int(last) + 1))
    return found
