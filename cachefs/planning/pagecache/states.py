"""The states of a block's pages, and the properties of each state."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import numpy as np
import numpy.typing as npt

from cachefs.planning.blocks.space import Ids


class PageState(IntEnum):
    """The state of one block's pages in the page cache of one mount. Arrays of states have the dtype uint8."""

    OUT = 0  # none of its pages is present
    COMING = 1  # the pusher was told to store its pages
    HELD = 2  # all its pages are present
    GOING = 3  # the pusher was told to drop its pages
    REFUSED = 4  # none of its pages is present, and they could not be stored a moment ago
    PART = 5  # some of its pages are present, as it is larger than one read; it counts in full
    PART_REFUSED = 6  # some of its pages are present, and the rest could not be stored a moment ago


# The same as plain integers, for arrays: numpy takes 7 us to compare 300,000 bytes with one, and 96 us with a member of
# an IntEnum, as it first makes every byte an int64.
OUT: Final = int(PageState.OUT)
COMING: Final = int(PageState.COMING)
HELD: Final = int(PageState.HELD)
GOING: Final = int(PageState.GOING)
REFUSED: Final = int(PageState.REFUSED)
PART: Final = int(PageState.PART)
PART_REFUSED: Final = int(PageState.PART_REFUSED)


def _table(*states: int) -> npt.NDArray[np.bool_]:
    """Return a table with True for *states*: shape (number of states,), bool."""
    return np.isin(np.arange(len(PageState)), states)


# Tables with one bool per state: index them with an array of states.
# Blocks to be pushed.
WANTED: Final = _table(OUT, PART)
# Blocks whose reader must ask the mount for some of it.
INCOMPLETE: Final = _table(OUT, COMING, REFUSED, PART, PART_REFUSED)
# Blocks that take nothing of the budget.
UNCOUNTED: Final = _table(OUT, REFUSED)
# Blocks whose pages may be dropped.
DROPPABLE: Final = _table(HELD, PART, PART_REFUSED)

# By snapshot: the PageState of each block of its space. Shape (blocks of the space,), dtype uint8.
PageStates = Mapping[str, npt.NDArray[np.uint8]]
NO_PAGES: Final[PageStates] = {}


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """Some blocks of one snapshot, in order."""

    snapshot: str
    ids: Ids  # block numbers, shape (n,), dtype int32


def bytes_of(sizes: npt.NDArray[np.uint32], ids: Ids) -> int:
    """Return the bytes of the blocks *ids* together: shape (n,), int32. sizes: bytes of each block of their space,
    shape (blocks of the space,), uint32."""
    return int(sizes[ids].sum(dtype=np.int64))
