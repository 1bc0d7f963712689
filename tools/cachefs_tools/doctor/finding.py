"""What a check has found: a level, the consequence for whoever uses the node, and the way out."""

from enum import StrEnum

import msgspec


class Level(StrEnum):
    """How bad a finding is, worst first."""

    PROBLEM = "problem"  # something does not work, or soon will not
    WARNING = "warning"  # it works, but worse than it could, or not after the next restart
    NOTE = "note"  # good to know; or a check that could not be made
    OK = "ok"


class Finding(msgspec.Struct, frozen=True):
    """One finding. Texts are single lines of plain words."""

    # Stable name of the check, as in `kernel.fuse_device`; what is before the point is its group.
    id: str
    level: Level
    # What was found.
    found: str
    # What follows from that for the node or its users; empty where nothing is wrong.
    consequence: str = ""
    # What to do; empty where there is nothing to do.
    way_out: str = ""

    @property
    def group(self) -> str:
        return self.id.partition(".")[0]


def ok(name: str, found: str) -> Finding:
    return Finding(name, Level.OK, found)


def note(name: str, found: str, consequence: str = "", way_out: str = "") -> Finding:
    return Finding(name, Level.NOTE, found, consequence, way_out)


def warning(name: str, found: str, consequence: str, way_out: str) -> Finding:
    return Finding(name, Level.WARNING, found, consequence, way_out)


def problem(name: str, found: str, consequence: str, way_out: str) -> Finding:
    return Finding(name, Level.PROBLEM, found, consequence, way_out)
