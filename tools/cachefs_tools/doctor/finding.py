"""Results of checks: a level, the consequence for users of the node, and the remedy."""

from enum import StrEnum

import msgspec


class Level(StrEnum):
    """Severity of a finding, worst first."""

    PROBLEM = "problem"  # something does not work, or soon will not
    WARNING = "warning"  # it works, but badly, or not after the next restart
    NOTE = "note"  # information, or a check that could not be made
    OK = "ok"


class Finding(msgspec.Struct, frozen=True):
    """The result of one check. Texts are single lines in plain words."""

    # Stable name of the check, as in `kernel.fuse_device`; the part before the dot is its group.
    id: str
    level: Level
    # The observation.
    found: str
    # The consequence for the node or its users; empty if nothing is wrong.
    consequence: str = ""
    # The remedy; empty if there is nothing to do.
    way_out: str = ""

    @property
    def group(self) -> str:
        return self.id.partition(".")[0]


def ok(name: str, found: str) -> Finding:
    return Finding(name, Level.OK, found)


def note(name: str, found: str, consequence: str = "", remedy: str = "") -> Finding:
    return Finding(name, Level.NOTE, found, consequence, remedy)


def warning(name: str, found: str, consequence: str, remedy: str) -> Finding:
    return Finding(name, Level.WARNING, found, consequence, remedy)


def problem(name: str, found: str, consequence: str, remedy: str) -> Finding:
    return Finding(name, Level.PROBLEM, found, consequence, remedy)
