"""Gathers facts in child processes, each with a deadline.

Threads would not do: a process with a thread that hangs in the kernel, at a dead mount or NFS server, cannot end. A
child that survives SIGKILL is left to the kernel.
"""

import contextlib
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any, Final, Generic, TypeVar

import msgspec

Facts = TypeVar("Facts")

# Most bytes of an answer; keeps a runaway child from filling memory.
MAX_BYTES: Final = 16 << 20
# Seconds that a child may take to end after its answer.
_LEAVE_SECONDS: Final = 1.0
# Seconds in which a child that only imports must have ended.
_TRY_SECONDS: Final = 10.0
_PIECE: Final = 1 << 16
_MODULE: Final = "cachefs_tools.doctor.child_main"
# Characters of a child's stderr that are reported.
_MAX_ERROR: Final = 300


class ProcessAccount(msgspec.Struct, frozen=True):
    """The user and groups of a child, as numbers."""

    user: int
    group: int
    groups: list[int]

    def can_run_child(self) -> bool:
        """Return whether this user can run a child: Python, or cachefs, may be readable by root only."""
        try:
            done = subprocess.run(
                [sys.executable, "-P", "-c", f"import {_MODULE}"], stdin=subprocess.DEVNULL, capture_output=True,
                timeout=_TRY_SECONDS, check=False, cwd="/", **_popen_arguments(self),
            )  # fmt: skip
        except (OSError, subprocess.SubprocessError):
            return False
        return not done.returncode


def _popen_arguments(account: ProcessAccount | None) -> dict[str, Any]:
    if account is None:
        return {}
    return {"user": account.user, "group": account.group, "extra_groups": account.groups}


class NoFacts(Exception):
    """A child has not answered, for the reason in the text."""


class FactChild(Generic[Facts]):
    """A child that runs `module.gather(argument)`, whose result has the type *kind*."""

    def __init__(
        self,
        module: str,
        argument: object,
        kind: type[Facts],
        seconds: float,
        environment: Mapping[str, str] | None = None,
        account: ProcessAccount | None = None,
    ) -> None:
        """Start the child.

        Args:
            module: of cachefs_tools.doctor.
            argument: any JSON value.
            kind: type of the result.
            seconds: deadline.
            environment: variables in addition to this process's.
            account: the child's user; None: this process's.
        """
        self._kind = kind
        self._seconds = seconds
        self._deadline = time.monotonic() + seconds
        command = [sys.executable, "-P", "-m", _MODULE, module]
        self._child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
            cwd="/" if account is not None else None,
            **_popen_arguments(account),
        )
        assert self._child.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._child.stdin as pipe:
            pipe.write(msgspec.json.encode(argument))

    def wait_for_facts(self) -> Facts:
        """Wait for the facts. Raises NoFacts."""
        try:
            out, errors = self._read_output()
            if self._exit_status(bool(out)):
                output = " ".join(errors.decode(errors="replace").split())
                raise NoFacts(f"the check has failed: {output[-_MAX_ERROR:] or 'no reason was given'}")
            return msgspec.json.decode(out, type=self._kind)
        except subprocess.TimeoutExpired:
            raise NoFacts(f"no answer within {self._seconds:.0f} s") from None
        except msgspec.MsgspecError as error:
            raise NoFacts(f"the check returned invalid facts: {error}") from None
        finally:
            self.kill()

    def kill(self) -> None:
        """Kill the child without waiting: it may hang in the kernel."""
        if self._child.poll() is None:
            self._child.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(0.2)
        for pipe in (self._child.stdout, self._child.stderr):
            if pipe is not None:
                pipe.close()

    def _exit_status(self, has_responded: bool) -> int:
        """Return the exit status; 0 if the child has answered but a thread of it hangs in the kernel."""
        try:
            return self._child.wait(_LEAVE_SECONDS)
        except subprocess.TimeoutExpired:
            if has_responded:
                return 0
            raise

    def _read_output(self) -> tuple[bytes, bytes]:
        """Return stdout and stderr of the child, once both are closed."""
        out, errors = bytearray(), bytearray()
        with selectors.DefaultSelector() as selector:
            for pipe, output in ((self._child.stdout, out), (self._child.stderr, errors)):
                assert pipe is not None
                selector.register(pipe, selectors.EVENT_READ, output)
            while selector.get_map():
                left = self._deadline - time.monotonic()
                if left <= 0 or len(out) + len(errors) > MAX_BYTES:
                    raise subprocess.TimeoutExpired(self._child.args, self._seconds)
                for key, _ in selector.select(left):
                    if piece := os.read(key.fd, _PIECE):
                        key.data.extend(piece)
                    else:
                        selector.unregister(key.fileobj)
        return bytes(out), bytes(errors)
