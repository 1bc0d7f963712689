"""The process that reads the control file, as the supervisor keeps it."""

import subprocess
import sys

# In a process of its own, as pytest's has threads, and a control process is a fork.
SUPERVISOR = """
import os, select, signal, time
from types import SimpleNamespace
from cachefs.mount.processes import control_process

class Ours(control_process.ControlProcess):
    def _run_process(self):
        os.eventfd_read(wanted)
        {serve}

def is_wanted():
    return bool(select.select([wanted], [], [], 0)[0])

wanted = os.eventfd(1, os.EFD_NONBLOCK)
ours = Ours(SimpleNamespace(control_wakeup=wanted, directory="/mnt/one"))
ours.keep_running()
(pidfd,) = ours.wakeup_descriptors
while is_wanted():
    time.sleep(0.01)
{then}
"""


def supervise(serve: str, then: str) -> list[str]:
    """What is printed. serve: done by the process; then: done by its supervisor."""
    program = SUPERVISOR.format(serve=serve, then=then)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


REPLACED = """
select.select([pidfd], [], [])
ours.keep_running()
print(is_wanted(), ours.wakeup_descriptors)
while not ours.wakeup_descriptors:
    time.sleep(0.1)
ours.keep_running()
print(ours.wakeup_descriptors != [wanted])
ours.kill_process()
"""


def test_one_that_is_stopped_is_killed_and_replaced_for_writers_that_wait() -> None:
    silence = "for _ in range(control_process.SILENT_SECONDS + 1): ours.kill_if_silent()"
    stopped = "os.kill(os.getpid(), signal.SIGSTOP)"
    assert supervise(stopped, silence + REPLACED) == ["True", "[]", "True"]


def test_one_that_crashes_is_replaced_for_writers_that_wait() -> None:
    assert supervise("os._exit(3)", REPLACED) == ["True", "[]", "True"]


def test_one_that_fails_names_its_mount() -> None:
    """The log may be the system's, with the lines of several mounts."""
    failing = "import logging, sys; logging.basicConfig(stream=sys.stdout); raise OSError"
    said = " ".join(supervise(failing, "select.select([pidfd], [], [])"))
    assert "the process 'control' of the mount on /mnt/one failed" in said


def test_one_that_is_well_is_left_alone() -> None:
    beating = "os.eventfd_write(self._heartbeats, 1); signal.pause()"
    then = """
for _ in range(3 * control_process.SILENT_SECONDS):
    os.eventfd_write(ours._heartbeats, 1)
    ours.kill_if_silent()
print(bool(select.select([pidfd], [], [], 0)[0]))
ours.kill_process()
"""
    assert supervise(beating, then) == ["False"]


def test_waiting_takes_no_processor_once_it_has_ended_while_a_later_process_of_the_mount_runs() -> None:
    """The later process has inherited the descriptor of the one that reads the control file."""
    ending = "select.select([self._heartbeats], [], [])"
    then = """
from cachefs.mount.processes.worker_pool import WorkerPool
pool = WorkerPool(None, None, 0)
pool.handle_events(0, ours.wakeup_descriptors)
later = os.fork()
if not later:
    signal.pause()
os.eventfd_write(ours._heartbeats, 1)
pool.handle_events(60, ours.wakeup_descriptors)
ours.keep_running()
began = time.monotonic()
pool.handle_events(0.2, ours.wakeup_descriptors)
print(time.monotonic() - began >= 0.2)
os.kill(later, signal.SIGKILL)
"""
    assert supervise(ending, then) == ["True"]
