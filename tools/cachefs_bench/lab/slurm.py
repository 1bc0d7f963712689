"""A Slurm for a lab: munge, a controller and some nodes, on this machine, in a network of its own.

Debian's slurmd may run several times on a host, each as a node with a port. The ports are in slurm.conf, so everything
runs in a network namespace, where no port is taken; commands enter it (`LabSlurm.run_command`). Job steps outlive the
slurmd that started them, so nodes also have a process namespace, which ends with the process that created it.
"""

import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from cachefs.errors import CachefsError
from cachefs_bench.lab.host import wait_for
from cachefs_tools.child_programs import KILL_WITH_PARENT, Child, wait_or_kill, wait_until

CPUS: Final = 4
# With this scheduler parameter, Slurm accepts jobs whose preferred features no node has.
DEFAULT_SCHEDULER: Final = "ignore_prefer_validation"
_SECONDS: Final = 60.0
_COMMAND_SECONDS: Final = 30.0
_SEARCH: Final = "/usr/sbin:/sbin:/usr/bin:/bin:/usr/local/sbin:/usr/local/bin"
_INSTALL: Final = "apt-get install --no-install-recommends slurmctld slurmd slurm-client munge"
# Slurm resolves no address, not even 127.0.0.1, if the loopback device has the only one (AI_ADDRCONFIG). This one, of a
# documentation range, exists in the namespace only.
_ADDRESS: Final = "192.0.2.1/32"
_INIT: Final = f"ip link set lo up && ip address add {_ADDRESS} dev lo && echo ready && exec cat"
_UNSHARE: Final = ("unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "--")

_CONFIGURATION: Final = """\
ClusterName=lab
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort=6817
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={work}/munge.socket
StateSaveLocation={work}/state
SlurmctldPidFile={work}/slurmctld.pid
SlurmdSpoolDir={work}/%n.spool
SlurmdPidFile={work}/%n.pid
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=2,{scheduler}
SlurmdParameters=config_overrides
KillWait=1
{more}
NodeName=DEFAULT CPUs={cpus} RealMemory=1000 Feature=lab State=UNKNOWN
NodeName={nodes} NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports}
PartitionName=main Nodes={nodes} Default=YES MaxTime=INFINITE State=UP
"""


class LabSlurm:
    """A running Slurm, with its configuration, Lua files, states and logs in one directory."""

    def __init__(self, work: Path, nodes: int, stack: ExitStack) -> None:
        self.work = work
        self.configuration = work / "slurm.conf"
        self.nodes = tuple(f"n{number}" for number in range(1, nodes + 1))
        self._stack = stack
        self._namespace = 0
        self._controller: Child | None = None

    @property
    def enter_command(self) -> tuple[str, ...]:
        """Words before a command that let it reach the controller. The started process becomes the command."""
        return ("nsenter", f"--net=/proc/{self._namespace}/ns/net", "--")

    @property
    def environment(self) -> dict[str, str]:
        """Variables for Slurm's commands."""
        return {"PATH": _SEARCH, "SLURM_CONF": str(self.configuration), "LANG": "C.UTF-8"}

    def run_command(self, *command: str, seconds: float = _COMMAND_SECONDS) -> str:
        """Run a command of Slurm, and return its output. Raises CachefsError with its error output."""
        done = self.try_command(*command, seconds=seconds)
        if done.returncode:
            raise CachefsError(f"{' '.join(command)}: {done.stderr.strip()[:500]}")
        return done.stdout.strip()

    def try_command(self, *command: str, seconds: float = _COMMAND_SECONDS) -> subprocess.CompletedProcess[str]:
        """Run a command of Slurm that may fail."""
        try:
            return subprocess.run(
                [*self.enter_command, *command], env=self.environment, stdin=subprocess.DEVNULL, capture_output=True,
                text=True, timeout=seconds, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise CachefsError(f"{' '.join(command)} did not end within {seconds:.0f} s") from None

    def submit_job(self, *options: str, script: str = "#!/bin/sh\nsleep 600\n") -> int:
        """Submit a batch job. Returns its number."""
        file = self.work / "job.sh"
        file.write_text(script)
        return int(self.run_command("sbatch", "--parsable", "--output=/dev/null", *options, str(file)))

    def job_state(self, job: int) -> tuple[str, tuple[str, ...], str]:
        """Return a job's state, its nodes, and why it waits."""
        output = self.run_command("squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T|%N|%r")
        state, nodes, why = output.split("|", 2)
        return state, self.expand_hostlist(nodes), why

    def expand_hostlist(self, hostlist: str) -> tuple[str, ...]:
        """Return the names in a host list such as `n[1-2]`."""
        return tuple(self.run_command("scontrol", "show", "hostnames", hostlist).split()) if hostlist else ()

    def node_features(self, node: str) -> tuple[set[str], set[str]]:
        """Return a node's available and active features."""
        shown = self.run_command("sinfo", "--Node", "--noheader", f"--nodes={node}", "--format=%f|%b")
        available, _, active = shown.partition("|")
        return _words(available), _words(active)

    def controller_log(self) -> str:
        """Return the controller's log."""
        return (self.work / "slurmctld.log").read_text(errors="replace")

    def start(self) -> None:
        """Start all servers, and wait until the nodes are idle. Raises CachefsError with the end of a log."""
        self._namespace = self._stack.enter_context(_namespace())
        key = self.work / "munge.key"
        self.run_command("mungekey", "--create", f"--keyfile={key}", "--bits=1024")
        munged = self._background(
            "munged", "--foreground", "--force", f"--key-file={key}", f"--socket={self.work}/munge.socket",
            f"--pid-file={self.work}/munged.pid", f"--seed-file={self.work}/munge.seed",
            f"--log-file={self.work}/munged.log",
        )  # fmt: skip
        wait_until((self.work / "munge.socket").exists, munged, self.work / "munged.log")
        self.start_controller("-c")
        for node in self.nodes:
            (self.work / f"{node}.spool").mkdir()
            self._background("slurmd", "-D", "-N", node, of_nodes=True, name=node)
        wait_for(self._is_ready, _SECONDS, f"all nodes are idle; see {self.work}/slurmctld.log")

    def start_controller(self, *options: str) -> None:
        """Start slurmctld, and wait until it responds."""
        self._controller = self._background("slurmctld", "-D", *options)
        log, process = self.work / "slurmctld.log", self._controller
        wait_until(lambda: self.try_command("scontrol", "ping").returncode == 0, process, log)

    def stop_controller(self) -> None:
        """Stop slurmctld in order, so that it saves its state."""
        assert self._controller is not None
        self._controller.send_signal(signal.SIGTERM)
        wait_or_kill(self._controller)

    def cancel_all(self) -> None:
        """Cancel all jobs, and wait until their nodes are free."""
        self.run_command("scancel", "--user=root")
        wait_for(lambda: not self.run_command("squeue", "--noheader"), _SECONDS, "no job is left")

    def _is_ready(self) -> bool:
        done = self.try_command("sinfo", "--noheader", "--Node", "--format=%T")
        return done.returncode == 0 and done.stdout.split() == ["idle"] * len(self.nodes)

    def _background(self, *command: str, of_nodes: bool = False, name: str = "") -> Child:
        """Start a server with its output in a log. It is killed at the end."""
        enter = self.enter_command
        if of_nodes:
            # nsenter then has a child, which ends with the process namespace.
            namespaces = f"/proc/{self._namespace}/ns"
            enter = (
                *self.enter_command[:-1],
                f"--mount={namespaces}/mnt",
                f"--pid={namespaces}/pid_for_children",
                "--",
            )
        with (self.work / f"{name or command[0]}.log").open("ab") as output:
            process = subprocess.Popen(
                [*KILL_WITH_PARENT, *enter, *command], env=self.environment, stdin=subprocess.DEVNULL, stdout=output,
                stderr=output, start_new_session=True,
            )  # fmt: skip
        self._stack.callback(_end, process)
        return process


@contextmanager
def run_slurm(work: Path, nodes: int = 4, scheduler: str = DEFAULT_SCHEDULER, more: str = "") -> Iterator[LabSlurm]:
    """Run a Slurm with its files in the existing directory *work*.

    scheduler: SchedulerParameters. more: lines of slurm.conf. Raises CachefsError if a program is missing.
    """
    _require("munged", "mungekey", "slurmctld", "slurmd", "sbatch", "scontrol", "nsenter", "unshare", "ip")
    with ExitStack() as stack:
        slurm = LabSlurm(work, nodes, stack)
        (work / "state").mkdir()
        ports = f"[17001-{17000 + nodes}]"
        slurm.configuration.write_text(_CONFIGURATION.format(
            work=work, nodes=f"n[1-{nodes}]", ports=ports, cpus=CPUS, scheduler=scheduler, more=more,
        ))  # fmt: skip
        slurm.start()
        yield slurm


@contextmanager
def _namespace() -> Iterator[int]:
    """Create namespaces, which live as long as the process whose id is yielded."""
    process = subprocess.Popen(
        [*KILL_WITH_PARENT, *_UNSHARE, "sh", "-c", _INIT], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        if process.stdout.readline() != b"ready\n":
            assert process.stderr is not None
            raise CachefsError(f"no namespaces for Slurm: {process.stderr.read().decode(errors='replace').strip()}")
        yield process.pid
    finally:
        _end(process)


def _end(process: Child) -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None:
            stream.close()


def _require(*programs: str) -> None:
    missing: Sequence[str] = [each for each in programs if shutil.which(each, path=_SEARCH) is None]
    if missing:
        raise CachefsError(f"{', '.join(missing)}: missing; install with: {_INSTALL} util-linux iproute2")


def _words(features: str) -> set[str]:
    return set() if features in ("", "(null)") else set(features.split(","))
