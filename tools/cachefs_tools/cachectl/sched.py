"""cachectl sched and cachectl scale: query and control cachefs-scheduler.

`SchedulerClient` calls it: JSON over HTTP, on its Unix socket or on TCP with certificates.
"""

import functools
import http.client
import os
import socket
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import quote, urlencode, urlsplit

import click
import msgspec
from rich.table import Table

from cachefs.errors import AccessDenied, CachefsError, ConfigError, DaemonUnavailable, NotFound
from cachefs.formatting import format_count, format_duration
from cachefs.pem_files import PemFiles
from cachefs.scheduling_messages import (
    EXPLAIN_PATH,
    NODES_PATH,
    POLICY_PATH,
    QUEUE_PATH,
    SCALE_PATH,
    STATUS_PATH,
    DatasetPolicy,
    JobExplanation,
    NodesStatus,
    NodeStatus,
    PolicyList,
    PolicyStatus,
    QueueEntry,
    QueueStatus,
    ScaleRequest,
    ScaleResult,
    SchedulerStatus,
)
from cachefs_tools.cachectl.command_session import CommandSession, with_session
from cachefs_tools.cachectl.display import share, size, table
from cachefs_tools.escaped_names import escape_name

DEFAULT_SOCKET: Final = Path("/run/cachefs-scheduler/cachefs-scheduler.sock")
# Environment variable with an address, as for --scheduler.
ADDRESS_VARIABLE: Final = "CACHEFS_SCHEDULER"
CALL_SECONDS: Final = 30.0
MAX_RESPONSE: Final = 256 << 20

Reply = TypeVar("Reply", bound=msgspec.Struct)
_ERRORS: Final = {400: ConfigError, 403: AccessDenied, 404: NotFound}
# Longest name in a table of at most 80 columns.
_MAX_NAME: Final = 24


class SchedulerClient:
    """Blocking client with a connection for each call."""

    def __init__(self, address: str = "", certificates: tuple[str, str, str] | None = None) -> None:
        """Create a client. Raises ConfigError.

        Args:
            address: path of the socket, unix:PATH, or http(s)://HOST:PORT; "": from the environment, or the default.
            certificates: files of the CA, the certificate and its key.
        """
        self.address = address or os.environ.get(ADDRESS_VARIABLE, "") or str(DEFAULT_SOCKET)
        # The form of cachefs-slurm-hint's configuration.
        self.address = self.address.removeprefix("unix:")
        self._url = urlsplit(self.address) if "://" in self.address else None
        if self._url is not None and (self._url.scheme not in ("http", "https") or not self._url.hostname):
            raise ConfigError(f"scheduler {self.address!r}: expected the path of a socket, or https://HOST:PORT")
        self._certificates = certificates

    def get(self, path: str, kind: type[Reply], **query: str) -> Reply:
        """Send a GET. Raises CachefsError."""
        parameters = {name: value for name, value in query.items() if value}
        target = f"{path}?{urlencode(parameters, quote_via=quote)}" if parameters else path
        return self._request("GET", target, None, kind)

    def post(self, path: str, body: msgspec.Struct, kind: type[Reply]) -> Reply:
        """Send a POST. Raises CachefsError."""
        return self._request("POST", path, msgspec.json.encode(body), kind)

    def _request(self, method: str, path: str, body: bytes | None, kind: type[Reply]) -> Reply:
        connection = self._connection()
        try:
            connection.request(method, path, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            content = response.read(MAX_RESPONSE)
        except (OSError, http.client.HTTPException) as error:
            raise self._unavailable(error) from None
        finally:
            connection.close()
        if response.status != 200:
            raise _ERRORS.get(response.status, CachefsError)(
                _error_text(content) or f"cachefs-scheduler answers with status {response.status}"
            )
        try:
            return msgspec.json.decode(content, type=kind)
        except msgspec.MsgspecError as error:
            raise CachefsError(f"{self.address} sent no valid response of cachefs-scheduler: {error}") from None

    def _connection(self) -> http.client.HTTPConnection:
        if self._url is None:
            return _UnixConnection(self.address)
        host, port = self._url.hostname or "", self._url.port
        if self._url.scheme == "http":
            return http.client.HTTPConnection(host, port, timeout=CALL_SECONDS)
        return http.client.HTTPSConnection(host, port, timeout=CALL_SECONDS, context=self._context())

    def _context(self) -> ssl.SSLContext:
        if self._certificates is None:
            return ssl.create_default_context()
        ca, cert, key = map(Path, self._certificates)
        return PemFiles(cert, key, ca, ("--tls: CERT", "KEY", "--tls: CA")).client_context()

    def _unavailable(self, error: Exception) -> CachefsError:
        if isinstance(error, PermissionError):
            return AccessDenied(
                f"you may not use {self.address}: be root, or in the group of service.socket_group of cachefs-scheduler"
            )
        why = (error.strerror if isinstance(error, OSError) else "") or str(error) or type(error).__name__
        return DaemonUnavailable(
            f"no cachefs-scheduler answers at {self.address}: {why}; start it, or name another with --scheduler"
        )


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=CALL_SECONDS)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(CALL_SECONDS)
        self.sock.connect(self._path)


class _ErrorBody(msgspec.Struct):
    error: str = ""


def _error_text(body: bytes) -> str:
    try:
        return " ".join(msgspec.json.decode(body, type=_ErrorBody).error.split())
    except msgspec.MsgspecError:
        return ""


def with_scheduler(function: Callable[..., None]) -> Callable[..., None]:
    """Make a command of a function whose first arguments are a CommandSession and a SchedulerClient."""

    @click.option(
        "--scheduler",
        metavar="ADDRESS",
        default="",
        help="Socket of cachefs-scheduler, or https://HOST:PORT.  [default: $CACHEFS_SCHEDULER, or the usual socket]",
    )
    @click.option("--tls", nargs=3, metavar="CA CERT KEY", default=None, help="Files of certificates, for https.")
    @with_session
    @functools.wraps(function)
    def run(session: CommandSession, *, scheduler: str, tls: tuple[str, str, str] | None, **arguments: Any) -> None:
        function(session, SchedulerClient(scheduler, tls), **arguments)

    return run


@click.group()
def sched() -> None:
    """Show what cachefs-scheduler knows, and set its policies."""


@sched.command()
@with_scheduler
def status(session: CommandSession, client: SchedulerClient) -> None:
    """Show nodes, their contents, jobs, and warm-ups that were ordered."""
    found, nodes = client.get(STATUS_PATH, SchedulerStatus), client.get(NODES_PATH, NodesStatus)
    document = {"status": found, "nodes": nodes.nodes}
    session.print_result(document, *_status(found, nodes))


def _status(found: SchedulerStatus, nodes: NodesStatus) -> Iterator[str | Table]:
    jobs = ", ".join(f"{count} {state}" for state, count in sorted(found.jobs.items())) or "none known"
    yield f"cachefs-scheduler {found.version}, up {format_duration(found.uptime)}; jobs: {jobs}"
    yield (
        f"{format_count(found.nodes, 'node')}, {found.fresh} have reported within a minute; "
        f"room for {size(found.capacity)}, {size(found.used)} taken"
    )
    if found.needed:
        yield f"jobs read {size(found.needed)}; {format_count(found.nodes_needed, 'node')} like these would hold it"
    yield ""
    yield table(
        "NODE =STATE >HEARD?? >ROOM? >TAKEN? >JOBS ~DATASETS",
        [
            (
                _shortened(node.name),
                node.state,
                f"{node.age:.0f} s ago" if node.age >= 0 else "never",
                size(node.capacity),
                size(node.used),
                node.jobs,
                ", ".join(f"{_shortened(part.dataset)} {share(part.bytes, part.total)}" for part in node.datasets[:3])
                or "-",
            )
            for node in nodes.nodes
        ],
    )
    running = [warmup for warmup in found.warmups if warmup.state in ("ordered", "running")]
    if running:
        yield ""
        yield table(
            "WARM-UP NODE DATASET >DONE FOR?",
            [
                (
                    one.purpose,
                    _shortened(one.node),
                    _shortened(one.dataset),
                    share(one.blocks, one.total),
                    _shortened(one.job),
                )
                for one in running
            ],
        )
    for problem in found.problems:
        yield f"note: {escape_name(problem)}"


def _cached_text(node: NodeStatus) -> str:
    parts = [f"{_shortened(dataset.dataset)} {share(dataset.bytes, dataset.total)}" for dataset in node.datasets[:3]]
    return ", ".join(parts) + (f", +{len(node.datasets) - 3}" if len(node.datasets) > 3 else "") or "-"


@sched.command()
@with_scheduler
def queue(session: CommandSession, client: SchedulerClient) -> None:
    """Show jobs that wait for a copy of their dataset, and all others."""
    found = client.get(QUEUE_PATH, QueueStatus)
    waiting = [job for job in found.jobs if job.state == "waiting"]
    lines: list[str | Table] = [f"{len(waiting)} of {len(found.jobs)} jobs wait"]
    if found.jobs:
        columns = ">PLACE JOB DATASET USER?? =STATE >SINCE ~NODES?"
        lines.append(table(columns, [_job(job) for job in found.jobs]))
    session.print_result(found, *lines)


def _job(one: QueueEntry) -> tuple[object, ...]:
    nodes = ", ".join(one.nodes[:2]) + (f" +{len(one.nodes) - 2}" if len(one.nodes) > 2 else "") or "-"
    return (
        one.place or "-", _shortened(one.job), _shortened(one.dataset), _shortened(one.user) or "-", one.state,
        format_duration(one.seconds), escape_name(nodes),
    )  # fmt: skip


@sched.command()
@click.argument("job")
@with_scheduler
def explain(session: CommandSession, client: SchedulerClient, job: str) -> None:
    """Explain why a job is on its nodes, or waits.

    JOB is kube:NAMESPACE/KIND/NAME or slurm:JOBID, as `cachectl sched queue` shows it. FIRST and LATER are the seconds
    that one rank would wait in its first epoch and in each later one; the other columns say where the bytes of an epoch
    would come from. A star stands before the nodes on which the job is.
    """
    found = client.get(EXPLAIN_PATH, JobExplanation, job=job)
    session.print_result(found, *_explained(found))


def _explained(found: JobExplanation) -> Iterator[str | Table]:
    where = f"on {escape_name(', '.join(found.placed))}" if found.placed else found.state
    job, dataset = escape_name(found.job), escape_name(found.dataset)
    yield f"{job}: {dataset} ({size(found.bytes)}), policy {found.policy}, {where}"
    for line in found.text:
        yield f"  {escape_name(line)}"
    if found.nodes:
        yield ""
        yield table(
            "NODE >SCORE >FIRST >LATER >LOCAL >ZONE? >OTHERS? >ORIGIN >HEARD??",
            [
                (
                    f"{'*' if node.node in found.placed else ''}{_shortened(node.node)}",
                    f"{node.score:.2f}",
                    f"{node.first:.3g} s",
                    f"{node.later:.3g} s",
                    size(node.local),
                    size(node.zone),
                    size(node.elsewhere),
                    size(node.origin),
                    f"{node.age:.0f} s" if node.age >= 0 else "never",
                )
                for node in found.nodes
            ],
        )


@sched.command()
@click.argument("dataset", default="")
@click.option("--max-jobs-per-copy", type=click.IntRange(0), help="Jobs that may read one copy at once; 0: any number.")
@click.option("--max-copies", type=click.IntRange(1, 1024), help="Copies that policy clone may make.")
@click.option("--cleanup", type=click.Choice(["none", "ttl", "lru", "pin"]), help="How unread copies are cleaned up.")
@click.option("--ttl", type=click.FloatRange(0, min_open=True), help="Seconds after the last read, for ttl.")
@click.option("--preload/--no-preload", default=None, help="Prefetch the data of a job as soon as the job is placed.")
@click.option("--release/--no-release", default=None, help="Empty nodes that a job has left.")
@with_scheduler
def policy(session: CommandSession, client: SchedulerClient, dataset: str, **options: Any) -> None:
    """Show the policies of datasets, or change the policy of one.

    What is changed here stays until it is changed again, also over restarts; it goes before the configuration.
    """
    if any(value is not None for value in options.values()):
        if not dataset:
            raise ConfigError("name the dataset whose policy is to change")
        changed = client.post(POLICY_PATH, DatasetPolicy(dataset=dataset, **options), PolicyStatus)
        found = PolicyList(datasets=[changed])
    else:
        found = client.get(POLICY_PATH, PolicyList, dataset=dataset)
    rows = [_policy(one) for one in found.datasets]
    session.print_result(found, table("DATASET >SIZE? >JOBS >WAIT >COPIES >EACH >MOST =CLEANUP =PRELOAD??", rows))


def _policy(one: PolicyStatus) -> tuple[object, ...]:
    effective = one.policy
    cleanup = f"ttl {format_duration(effective.ttl or 0)}" if effective.cleanup == "ttl" else effective.cleanup
    return (
        _shortened(effective.dataset), size(one.bytes), one.running, one.waiting, len(one.copies),
        effective.max_jobs_per_copy or "any", effective.max_copies, cleanup, "yes" if effective.preload else "no",
    )  # fmt: skip


@click.command()
@click.option("--job", default="", help="A job that has moved to other nodes; its data are moved too.")
@click.option("--nodes", default="", metavar="NODE,...", help="The present nodes of --job.")
@click.option("--dataset", default="", help="A dataset whose number of copies changes.")
@click.option("--copies", type=click.IntRange(1, 1024), default=None, help="The number of copies of --dataset.")
@click.option("--drain", default="", metavar="NODE", help="A node that is to leave its cluster.")
@with_scheduler
def scale(session: CommandSession, client: SchedulerClient, **options: Any) -> None:
    """Move the cache with a job, a dataset, or off a node.

    One of: --job with --nodes, --dataset with --copies, --drain. Nodes are emptied only of what others hold by then,
    and where no job reads. `cachectl scale-hint` says how many nodes are needed.
    """
    nodes = [one.strip() for one in options["nodes"].split(",") if one.strip()]
    if options["dataset"] and options["copies"] is None:
        raise ConfigError("how many copies of it? Say --copies N with --dataset")
    request = ScaleRequest(
        job=options["job"],
        nodes=nodes,
        dataset=options["dataset"],
        copies=options["copies"] or 0,
        drain=options["drain"],
    )
    try:
        msgspec.json.decode(msgspec.json.encode(request), type=ScaleRequest)
    except msgspec.MsgspecError as error:
        raise ConfigError(str(error)) from None
    found = client.post(SCALE_PATH, request, ScaleResult)
    session.print_result(found, *map(escape_name, found.text))


def _shortened(text: str) -> str:
    """Shorten a name in the middle: both ends are significant."""
    shown = escape_name(text)
    if len(shown) <= _MAX_NAME:
        return shown
    return f"{shown[: _MAX_NAME // 2 - 1]}…{shown[-(_MAX_NAME // 2) :]}"
