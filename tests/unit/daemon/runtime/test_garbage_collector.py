"""Python's collector, once the daemon is ready."""

import subprocess
import sys

from cachefs_daemon.runtime import garbage_collector

_SCRIPT = """
import gc
from cachefs_daemon.runtime import garbage_collector
garbage_collector.freeze_present_objects()
print(gc.get_freeze_count() > 1000, gc.isenabled(), gc.get_threshold()[0])
"""


def test_it_looks_at_what_is_new_and_at_nothing_else() -> None:
    said = subprocess.run([sys.executable, "-c", _SCRIPT], capture_output=True, text=True, check=True).stdout
    assert said.split() == ["True", "True", str(garbage_collector.YOUNG_THRESHOLD)]
