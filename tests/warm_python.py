"""Starts Python programs by forking a process that has imported their modules.

That takes 0.03 s of a processor for the daemon, which takes 0.5 s to import, and saves 2 s for a job that uses torch.

`WarmPython.start` takes the command that `subprocess.Popen` would be given: `python SCRIPT ...` or `python -c CODE`,
alone or after `cachefs run ... --` or `setpriv --pdeathsig=KILL`. It returns a Popen, whose process has the arguments,
environment, working directory and standard files of that command, its exit status and its signals. The code of
`cachefs run` runs in the process of the program, as it does where that process becomes the command, and so does the
sitecustomize that PYTHONPATH names.

What differs from a process of its own:

- The modules of the server, and what they import, are there before the program begins. So the hooks of `cachefs run`
  are installed before the first line of a job, and not when it imports torch, and a job that never imports torch is
  watched too.
- The parent is the server, and the garbage collector does not look at objects of the server.
- When Python has ended, the process ends: nothing that libraries in C++ do at the end is done.
- A daemon, a mount and a scheduler do not free what Python holds at their end, and what a daemon starts is forked too
  (tests/warm_children.py).
- Of variables that Python itself reads at its start, PYTHONPATH counts, and no other. Options of Python are refused.
- A process that the program starts, such as a worker that is spawned, imports torch anew. So a test that starts many of
  these gains nothing.

Tests of a command itself, of its environment, of signals and of jobs without torch start it as users do: cachefsd where
`tests.daemon.Daemon` is given a wrapper, `cachefs run` in tests/node/publishing/test_run.py ("the command") and
test_words.py. `test_warm_torch.py` beside them holds both ways to the same.
"""

import array
import contextlib
import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PROCESS = Path(__file__).with_name("warm_python_process.py")
# Seconds in which the server has to fork.
FORK_SECONDS = 100.0
# What jobs with torch import. Python would draw another seed for each process.
TORCH = ("numpy", "torch.utils.data")
HASH_SEED = {"PYTHONHASHSEED": "0"}
# What a job inherits where its command names no file.
_OWN = (0, 1, 2)


class WarmPython:
    """A server with modules imported. The programs that it starts are forked."""

    def __init__(self, modules: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        """Start the server, with *environment* added to this process's own."""
        self._link, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with other:
            self._server = subprocess.Popen(
                [sys.executable, str(PROCESS), str(other.fileno()), *modules],
                env={**os.environ, **(environment or {})},
                pass_fds=[other.fileno()],
            )

    def start(self, command: Sequence[str | Path], **options: Any) -> "subprocess.Popen[str]":
        """Start *command*. *options* are those of Popen: stdin, stdout, stderr, cwd, env, text."""
        return _Forked(self, [*map(str, command)], **{"text": True, **options})

    def run(
        self, command: Sequence[str | Path], *, timeout: float, env: Mapping[str, str] | None = None
    ) -> "subprocess.CompletedProcess[str]":
        """Run *command* and keep what it prints. Raises TimeoutExpired, once it was killed."""
        job = self.start(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env)
        with job:
            try:
                stdout, stderr = job.communicate(timeout=timeout)
            except BaseException:
                job.kill()
                raise
        return subprocess.CompletedProcess(job.args, job.returncode, stdout, stderr)

    def fork(
        self, command: Sequence[str], environment: Mapping[str, str], directory: str, files: Sequence[int]
    ) -> tuple[int, socket.socket]:
        """Have the server fork. Returns the number of the new process, and where its exit status will come."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        request = {"command": command, "environment": {**environment}, "directory": directory}
        with theirs:
            sent = array.array("i", [*files, theirs.fileno()])
            self._link.sendmsg([json.dumps(request).encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, sent)])
        ours.settimeout(FORK_SECONDS)
        pid = int(ours.recv(64) or b"0")
        assert pid, f"the server of warm processes has ended: {self._server.poll()}"
        return pid, ours

    @property
    def link(self) -> int:
        """The descriptor of requests to the server. It ends when all processes that have it have closed it."""
        return self._link.fileno()


@functools.cache
def warm(*modules: str) -> WarmPython:
    """Returns this test process's server with these modules, which ends when this process ends."""
    return WarmPython(modules)


@functools.cache
def warm_torch() -> WarmPython:
    """Returns this test process's server of jobs with torch."""
    return WarmPython(TORCH, HASH_SEED)


class _Forked(subprocess.Popen[str]):
    """A process that the server has forked. Only how it is started, and where its status comes from, is different."""

    def __init__(self, server: WarmPython, command: Sequence[str], **options: Any) -> None:
        self._server = server
        self._status: socket.socket | None = None
        super().__init__(command, **options)

    def _execute_child(
        self, args: Sequence[str], executable: None, preexec_fn: None, close_fds: bool, pass_fds: tuple[int, ...],
        cwd: str | Path | None, env: Mapping[str, str] | None, startupinfo: None, creationflags: int, shell: bool,
        *pipes: Any,
    ) -> None:  # fmt: skip
        p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, *_ = pipes
        given = (p2cread, c2pwrite, errwrite)
        files = [own if file == -1 else file for own, file in zip(_OWN, given, strict=True)]
        try:
            self.pid, self._status = self._server.fork(args, env or os.environ, str(cwd or os.getcwd()), files)
            self._child_created = True
        finally:
            self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]

    def _internal_poll(self, _deadstate: object = None) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._wait(0)
        return self.returncode

    def _wait(self, timeout: float | None) -> int:
        if self._status is not None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            with self._status as link:
                # Where the server was killed, nothing tells how the job has ended.
                self.returncode = int(link.recv(64) or -signal.SIGKILL)
            self._status = None
        return self.returncode
