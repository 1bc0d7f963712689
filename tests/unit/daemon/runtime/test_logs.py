"""Lines of the daemon's log: text, JSON, and the priorities of the journal."""

import json
import logging
import os
import subprocess
import sys

import pytest

from cachefs_daemon.runtime import logs

SAYS = """
import logging
from cachefs_daemon.runtime import logs
logs.set_up_logging("info", logs.LogFormat({form!r}))
log = logging.getLogger("some.part")
log.debug("unheard")
log.warning("a thing of %d", 3)
try:
    1 / 0
except ZeroDivisionError:
    log.exception("two\\nlines")
logs.set_level("debug")
log.debug("heard as %s", logs.current_level())
"""


def said(form: str, *, journal: bool) -> list[str]:
    """The lines on stderr."""
    reader, writer = os.pipe()
    status = os.fstat(writer)
    stream = {"JOURNAL_STREAM": f"{status.st_dev}:{status.st_ino}" if journal else "1:1"}
    program = [sys.executable, "-c", SAYS.format(form=form)]
    subprocess.run(program, stderr=writer, env={**os.environ, **stream}, check=True, timeout=60)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        return pipe.read().splitlines()


def test_each_line_in_the_journal_has_its_priority_and_no_time() -> None:
    lines = said("text", journal=True)
    assert lines[0] == "<4>WARNING some.part: a thing of 3"
    assert lines[1] == "<3>ERROR some.part: two\\nlines", "a message cannot begin a line of its own"
    assert all(line.startswith("<3>") for line in lines[1:-1])
    assert lines[-1] == "<7>DEBUG some.part: heard as debug"


def test_elsewhere_there_is_a_time_and_no_priority() -> None:
    """Also where a program that was started by a service has the journal's variable."""
    first, *_ = said("text", journal=False)
    assert first[:2] == "20"
    assert first.endswith(" WARNING some.part: a thing of 3")


@pytest.mark.parametrize("journal", [False, True])
def test_json_is_an_object_in_a_line(journal: bool) -> None:
    lines = said("json", journal=journal)
    first, second, third = (json.loads(line.partition(">")[2] if journal else line) for line in lines)
    assert (first["level"], first["logger"], first["message"]) == ("warning", "some.part", "a thing of 3")
    assert first["time"].endswith("+00:00")
    assert "ZeroDivisionError" in second["exception"]
    assert third["message"] == "heard as debug"


def test_levels_are_those_of_the_configuration() -> None:
    for level in logs.LEVELS:
        assert level.upper() in logging.getLevelNamesMapping()
