"""Python's collector of unreachable cycles, as it suits a process that makes many short-lived objects for each block
and hardly any cycles.

With Python's own settings it took 6 % of the processor time of a fetched block: it looks at the young objects 1.5 times
per block, most of which are part of a fetch that is not over yet, and every so often at all that was ever imported.
"""

import gc
from typing import Final

# Objects that are made, and not freed, between two looks at them; a look takes up to 1 ms. And looks at young objects
# for each at those that have survived one, and so on.
YOUNG: Final = 10_000
OLDER: Final = 20


def settle() -> None:
    """All that is there now stays: the collector is not to look at it again. To be called once, after the start."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, OLDER, OLDER)
