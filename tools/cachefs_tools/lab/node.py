"""A node of the lab: a daemon and a mount on a host, which can be killed, stopped and started again.

What must outlive the daemon (its state, the SSD tier, its logs) is in one directory. A memory tier is in /dev/shm, and
is empty again after `Node.reboot`.
"""

import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final

import psutil

from cachefs.errors import CachefsError, DaemonUnavailable
from cachefs.messages import Empty, Status
from cachefs.mount import kernel
from cachefs.rpc import STATUS, DaemonClient
from cachefs_tools.lab.host import Host, run
from cachefs_tools.lab.scratch import MEMORY_PREFIX
from cachefs_tools.scratch_config import NodeSettings, configuration
from cachefs_tools.scratch_node import (
    MOUNTED,
    SCRATCH,
    START_SECONDS,
    Account,
    Child,
    environment_for,
    is_mounted,
    memory_directory,
    program,
    wait_until,
)

# Seconds that a daemon may take to end: it hands over what it holds alone, if it is told to drain.
STOP_SECONDS: Final = 30.0
# Seconds: other programs' namespaces may keep a mount that was detached, and its process.
_GRACE: Final = 5
# Nothing stands between readers and tiers: those of the lab drop pages that were pushed, and send no ioctls.
MOUNT_OPTIONS: Final = ("no_push", "shield=off")


class Node:
    """One node. It is made stopped; `made_node` ends it whatever has happened."""

    def __init__(self, name: str, host: Host, work: Path, memory: Path, account: Account = SCRATCH) -> None:
        self.name = name
        self.host = host
        self.work = work  # holds its socket, state, SSD tier, configuration, logs and mount point
        self.memory = memory
        self.client: DaemonClient  # since the first start
        self._account = account
        self._daemon: Child | None = None
        self._mount: Child | None = None

    @property
    def socket(self) -> Path:
        return self.work / "cachefsd.sock"

    @property
    def log(self) -> Path:
        return self.work / "cachefsd.log"

    @property
    def mountpoint(self) -> Path:
        """Where the dataset is, on the host."""
        return self.work / "mnt"

    @property
    def seen(self) -> Path:
        """Where this process finds the dataset."""
        return self.host.seen(self.mountpoint)

    @property
    def runs(self) -> bool:
        """Is there a daemon?"""
        return self._daemon is not None and self._daemon.poll() is None

    @property
    def pid(self) -> int:
        """Of the daemon."""
        if self._daemon is None:
            raise CachefsError(f"{self.name} does not run")
        return self._daemon.pid

    def start(self, settings: NodeSettings) -> None:
        """Start the daemon, and wait until it answers. Raises CachefsError with the end of its log."""
        self.spawn(settings)
        self.ready()

    def spawn(self, settings: NodeSettings) -> None:
        """Start the daemon, and do not wait."""
        config = self.work / "cachefsd.toml"
        config.write_text(configuration(self.work, self.memory, settings))
        self.socket.unlink(missing_ok=True)
        command = [program("cachefsd"), "--config", str(config)]
        self._daemon = self._run(command, self.log)

    def ready(self) -> None:
        """Wait until a daemon that was spawned answers."""
        assert self._daemon is not None
        wait_until(self.socket.exists, self._daemon, self.log)
        self.client = DaemonClient(self.socket)
        self.client.call(STATUS, Empty(), timeout=START_SECONDS)

    def mount(self, dataset: str, options: Sequence[str] = MOUNT_OPTIONS) -> None:
        """Mount the dataset, and wait until it can be read."""
        self.mountpoint.mkdir(exist_ok=True)
        log = self.work / "mount.log"
        command = [
            program("mount.cachefs"), dataset, str(self.mountpoint), "-f", "-o",
            ",".join((f"socket={self.socket}", f"grace={_GRACE}", *options)),
        ]  # fmt: skip
        said = log.stat().st_size if log.exists() else 0  # by those that were mounted there before
        self._mount = self._run(command, log)
        wait_until(lambda: MOUNTED in log.read_bytes()[said:], self._mount, log)

    def status(self) -> Status:
        """What `cachectl status` shows. Raises DaemonUnavailable."""
        return self.client.call(STATUS, Empty(), timeout=10)

    def kill(self) -> None:
        """Daemon and mount end without a word, and all that they have started."""
        for process in self._processes():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._ended()

    def kill_daemon(self) -> None:
        """The daemon ends without a word (SIGKILL); the mount goes on, and `spawn` starts another daemon."""
        if self._daemon is not None:
            self._daemon.kill()
            self._daemon.wait()

    def reboot(self) -> None:
        """As `kill`, and what was in memory is lost."""
        self.kill()
        for path in self.memory.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def suspend(self) -> None:
        """Daemon and its processes stand still, as on a machine that is stuck. The mount goes on."""
        for process in self._daemon_processes():
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """They go on."""
        for process in self._daemon_processes():
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        """End mount and daemon in good order. Raises CachefsError where the daemon does not end."""
        # A mount process that is told to end would wait for this process, where it has read the mount.
        if self._mount is not None and self._mount.poll() is None:
            self._unmount()
        for process in (self._mount, self._daemon):
            if process is not None and process.poll() is None:
                process.terminate()
                try:
                    process.wait(STOP_SECONDS)
                except subprocess.TimeoutExpired:
                    self.kill()
                    raise CachefsError(f"{self.name} does not stop; its log ends: {self.last_words()}") from None
        self._ended()

    def last_words(self) -> str:
        """The end of the daemon's log."""
        return self.log.read_text(errors="replace")[-1500:].strip() if self.log.exists() else "(no log)"

    def _processes(self) -> list[psutil.Process]:
        found = self._daemon_processes()
        if self._mount is not None and self._mount.poll() is None:
            found += _family(self._mount.pid)
        return found

    def _daemon_processes(self) -> list[psutil.Process]:
        return _family(self._daemon.pid) if self.runs and self._daemon is not None else []

    def _ended(self) -> None:
        for process in (self._mount, self._daemon):
            if process is not None:
                process.wait()
        if self._daemon is not None:
            with suppress(AttributeError):
                self.client.close()
        if self._mount is not None:
            self._unmount()
        self._mount = self._daemon = None

    def _unmount(self) -> None:
        """Detach the mount from its directory, where it is there."""
        with suppress(CachefsError, OSError):
            if self.host.pid:
                run([*self.host.enter, "umount", "--lazy", str(self.mountpoint)])
            elif is_mounted(self.mountpoint):
                kernel.unmount(self.mountpoint, lazy=True)

    def _run(self, command: Sequence[str], log: Path) -> Child:
        return self.host.start(command, log, environment_for(self._account))


@contextmanager
def made_node(name: str, host: Host, work: Path, account: Account = SCRATCH) -> Iterator[Node]:
    """A node that does not run yet. *work* is made; nothing runs or is mounted in the end."""
    work.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        memory = stack.enter_context(memory_directory(MEMORY_PREFIX))
        node = Node(name, host, work, memory, account)
        try:
            yield node
        finally:
            node.kill()


def unavailable(node: Node, error: DaemonUnavailable) -> CachefsError:
    """What to say where a daemon that should answer does not."""
    return CachefsError(f"{node.name}: {error}; its log ends: {node.last_words()}")


def _family(pid: int) -> list[psutil.Process]:
    """A process and all below it, children last: who would replace them goes first."""
    try:
        parent = psutil.Process(pid)
        return [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []
