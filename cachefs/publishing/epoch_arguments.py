"""Finds the number of epochs in the arguments of a training program."""

import re
from collections.abc import Sequence
from typing import Final

# `--epochs`, `--num-epochs`, `--max_epochs`, `--num_train_epochs`, `trainer.max_epochs` of Hydra …
_NAME: Final = re.compile(
    r"(?:--?)?(?:[A-Za-z0-9_]+\.)*(?:(?:n|num|max|total|train|training)[-_])*epochs?", re.IGNORECASE
)
# Maximum number of arguments examined, and of epochs of a job.
_MOST_ARGUMENTS: Final = 1000
_MOST_EPOCHS: Final = 1_000_000


def planned_epochs(arguments: Sequence[str]) -> int:
    """Return the number of epochs in a program's arguments; 0 where they name none, or several."""
    found = set()
    for position, argument in enumerate(arguments[:_MOST_ARGUMENTS]):
        name, equals, value = argument[:200].partition("=")
        if not _NAME.fullmatch(name) or not (equals or name.startswith("-")):
            continue
        value = value if equals else next(iter(arguments[position + 1 : position + 2]), "")
        if re.fullmatch(r"\d{1,7}", value) and 0 < int(value) <= _MOST_EPOCHS:
            found.add(int(value))
    return found.pop() if len(found) == 1 else 0
