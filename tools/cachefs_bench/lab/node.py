"""A node of the lab: a daemon and a mount on a host, which can be killed, suspended and restarted.

What must outlive the daemon (its state, the SSD tier, its logs) is in one directory. The memory tier is in /dev/shm,
and is emptied by `LabNode.reboot`.
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
from cachefs_bench.lab.host import LabHost, run_command
from cachefs_bench.lab.scratch import MEMORY_PREFIX
from cachefs_bench.lab.scratch_node import (
    SCRATCH_CREDENTIALS,
    NodeSettings,
    S3Credentials,
    configuration_text,
    environment_with,
    memory_directory,
)
from cachefs_tools.child_programs import MOUNTED_LINE, START_SECONDS, Child, is_mounted, program_path, wait_until

# Seconds that a daemon may take to end: when draining, it hands over blocks that only it holds.
STOP_SECONDS: Final = 30.0
# Grace in seconds: other programs' namespaces may keep a detached mount and its process alive.
_GRACE: Final = 5
# Readers of the lab drop pushed pages and send no ioctls, so pusher and shield would have no effect.
MOUNT_OPTIONS: Final = ("no_push", "shield=off")


class LabNode:
    """One node, initially stopped; `create_node` ends it in any case."""

    def __init__(
        self, name: str, host: LabHost, work: Path, memory: Path, account: S3Credentials = SCRATCH_CREDENTIALS
    ) -> None:
        self.name = name
        self.host = host
        self.work = work  # holds its socket, state, SSD tier, configuration, logs and mount point
        self.memory = memory
        self.client: DaemonClient  # set by the first start
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
        """Mount point of the dataset, on the host."""
        return self.work / "mnt"

    @property
    def dataset_path(self) -> Path:
        """Path of the dataset for this process."""
        return self.host.path_from_outside(self.mountpoint)

    @property
    def is_running(self) -> bool:
        """Return whether the daemon's process runs."""
        return self._daemon is not None and self._daemon.poll() is None

    @property
    def pid(self) -> int:
        """Process id of the daemon. Raises CachefsError if it was never started."""
        if self._daemon is None:
            raise CachefsError(f"{self.name} does not run")
        return self._daemon.pid

    def start(self, settings: NodeSettings) -> None:
        """Start the daemon, and wait until it responds. Raises CachefsError with the end of its log."""
        self.start_daemon(settings)
        self.wait_ready()

    def start_daemon(self, settings: NodeSettings) -> None:
        """Start the daemon without waiting."""
        config = self.work / "cachefsd.toml"
        config.write_text(configuration_text(self.work, self.memory, settings))
        self.socket.unlink(missing_ok=True)
        command = [program_path("cachefsd"), "--config", str(config)]
        self._daemon = self._run(command, self.log)

    def wait_ready(self) -> None:
        """Wait until a spawned daemon responds."""
        assert self._daemon is not None
        wait_until(self.socket.exists, self._daemon, self.log)
        self.client = DaemonClient(self.socket)
        self.client.call(STATUS, Empty(), timeout=START_SECONDS)

    def mount(self, dataset: str, options: Sequence[str] = MOUNT_OPTIONS) -> None:
        """Mount the dataset, and wait until it is readable."""
        self.mountpoint.mkdir(exist_ok=True)
        log = self.work / "mount.log"
        command = [
            program_path("mount.cachefs"), dataset, str(self.mountpoint), "-f", "-o",
            ",".join((f"socket={self.socket}", f"grace={_GRACE}", *options)),
        ]  # fmt: skip
        log_length = log.stat().st_size if log.exists() else 0  # length of the log of earlier mounts
        self._mount = self._run(command, log)
        wait_until(lambda: MOUNTED_LINE in log.read_bytes()[log_length:], self._mount, log)

    def status(self) -> Status:
        """Return the status as shown by `cachectl status`. Raises DaemonUnavailable."""
        return self.client.call(STATUS, Empty(), timeout=10)

    def kill(self) -> None:
        """Kill daemon and mount with all their children."""
        for process in self._processes():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._clean_up()

    def kill_daemon(self) -> None:
        """Kill the daemon (SIGKILL); the mount goes on, and `start_daemon` starts another daemon."""
        if self._daemon is not None:
            self._daemon.kill()
            self._daemon.wait()

    def reboot(self) -> None:
        """Kill the node, and erase its memory tier."""
        self.kill()
        for path in self.memory.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def suspend(self) -> None:
        """Suspend the daemon and its children, as on a stuck machine. The mount goes on."""
        for process in self._daemon_processes():
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Resume the daemon and its children."""
        for process in self._daemon_processes():
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        """Stop mount and daemon in order. Raises CachefsError if the daemon does not end."""
        # A mount process that receives SIGTERM would wait for this process, if this process has read the mount.
        if self._mount is not None and self._mount.poll() is None:
            self._unmount()
        for process in (self._mount, self._daemon):
            if process is not None and process.poll() is None:
                process.terminate()
                try:
                    process.wait(STOP_SECONDS)
                except subprocess.TimeoutExpired:
                    self.kill()
                    raise CachefsError(f"{self.name} does not stop; its log ends: {self.log_end()}") from None
        self._clean_up()

    def log_end(self) -> str:
        """Return the end of the daemon's log."""
        return self.log.read_text(errors="replace")[-1500:].strip() if self.log.exists() else "(no log)"

    def _processes(self) -> list[psutil.Process]:
        found = self._daemon_processes()
        if self._mount is not None and self._mount.poll() is None:
            found += _process_tree(self._mount.pid)
        return found

    def _daemon_processes(self) -> list[psutil.Process]:
        return _process_tree(self._daemon.pid) if self.is_running and self._daemon is not None else []

    def _clean_up(self) -> None:
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
        with suppress(CachefsError, OSError):
            if self.host.pid:
                run_command([*self.host.enter_command, "umount", "--lazy", str(self.mountpoint)])
            elif is_mounted(self.mountpoint):
                kernel.unmount(self.mountpoint, lazy=True)

    def _run(self, command: Sequence[str], log: Path) -> Child:
        return self.host.start_program(command, log, environment_with(self._account))


@contextmanager
def create_node(
    name: str, host: LabHost, work: Path, account: S3Credentials = SCRATCH_CREDENTIALS
) -> Iterator[LabNode]:
    """Create a stopped node in the new directory *work*. At the end nothing of it runs or is mounted."""
    work.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        memory = stack.enter_context(memory_directory(MEMORY_PREFIX))
        node = LabNode(name, host, work, memory, account)
        try:
            yield node
        finally:
            node.kill()


def unavailable_error(node: LabNode, error: DaemonUnavailable) -> CachefsError:
    """Return an error for a daemon that should respond and does not."""
    return CachefsError(f"{node.name}: {error}; its log ends: {node.log_end()}")


def _process_tree(pid: int) -> list[psutil.Process]:
    """Return a process and its descendants, children last: a supervisor must go first."""
    try:
        parent = psutil.Process(pid)
        return [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []
