"""Checks that the daemon of this node runs and responds, and that this user may use it."""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from cachefs.errors import CachefsError, DaemonUnavailable
from cachefs.formatting import format_count, format_duration
from cachefs.listener import is_stopped, listening_process
from cachefs.messages import DatasetName, DatasetView, Empty, OriginOptions, Status
from cachefs.rpc import CLUSTER, DATASET_LIST, DATASET_SHOW, STATUS, DaemonClient
from cachefs.socket_path import refusal_reason
from cachefs.trouble_texts import Cause, describe_consequence, describe_trouble, is_failing, remedy
from cachefs_tools.doctor.fact_child import ProcessAccount
from cachefs_tools.doctor.finding import Finding, note, ok, problem, warning
from cachefs_tools.escaped_names import escape_name

CALL_SECONDS: Final = 5.0
SHOW_SECONDS: Final = 30.0
# Most datasets whose options are requested: each costs the daemon a walk over the dataset's blocks.
MAX_DATASETS: Final = 16
# Most lines with problems of other nodes.
MAX_LINES: Final = 8
# Seconds for which an error counts as current.
_RECENT: Final = 3600.0
# Variables with which the daemon finds credentials, CAs and proxies; checks in its place need them.
_ORIGIN_VARIABLES: Final = (
    "AWS_",
    "GOOGLE_",
    "AZURE_",
    "HF_",
    "REQUESTS_CA_BUNDLE",
    "SSL_CERT_",
    "HOME",
    "CURL_CA_BUNDLE",
)
_PROXIES: Final = ("http_proxy", "https_proxy", "no_proxy", "all_proxy")


class NodeQuery(msgspec.Struct, frozen=True):
    """The request to this check."""

    socket: str
    # Datasets whose options are wanted.
    datasets: Sequence[str] = ()
    # Whether the options of all datasets are wanted.
    all_datasets: bool = False


class DaemonFacts(msgspec.Struct, frozen=True):
    """Facts about the daemon."""

    socket: str
    # Why the socket cannot be used; empty if a daemon listens and this user may connect.
    refusal: str = ""
    # The daemon's process id; 0: unknown.
    pid: int = 0
    is_stopped: bool = False
    # None: it has not answered; `error` says why.
    status: Status | None = None
    datasets: Sequence[DatasetView] = ()
    options: Mapping[str, OriginOptions] = {}
    error: str = ""
    # Problems that nodes of the cluster report, each line with the node's name.
    cluster: Sequence[str] = ()
    # Addresses of other nodes that are not used, a line each.
    rails: Sequence[str] = ()


def gather(argument: object) -> DaemonFacts:
    """Gather facts. argument: a Question."""
    wanted = msgspec.convert(argument, NodeQuery)
    socket = Path(wanted.socket)
    if reason := refusal_reason(socket):
        return DaemonFacts(wanted.socket, reason)
    pid = listening_process(socket) or 0
    if pid and is_stopped(pid):
        return DaemonFacts(wanted.socket, pid=pid, is_stopped=True, error="it is stopped")
    try:
        client = DaemonClient(socket)
        status = client.call(STATUS, Empty(), CALL_SECONDS)
        datasets = client.call(DATASET_LIST, Empty(), CALL_SECONDS).datasets
        known = [each.name for each in datasets]
        names = known if wanted.all_datasets else [name for name in wanted.datasets if name in known]
        details = [client.call(DATASET_SHOW, DatasetName(name=name), SHOW_SECONDS) for name in names[:MAX_DATASETS]]
        options = {detail.dataset.name: detail.options for detail in details}
    except DaemonUnavailable as error:
        return DaemonFacts(wanted.socket, pid=pid, error=str(error))
    except CachefsError as error:
        return DaemonFacts(wanted.socket, pid=pid, error=f"it answers with an error: {error}")
    cluster, rails = _cluster_problems(client) if status.cluster.source != "none" else ([], [])
    return DaemonFacts(wanted.socket, "", status.pid, False, status, datasets, options, cluster=cluster, rails=rails)


def _cluster_problems(client: DaemonClient) -> tuple[list[str], list[str]]:
    """Return the problems that nodes report, and those of addresses of nodes that answer at another address."""
    try:
        members = client.call(CLUSTER, Empty(), CALL_SECONDS).members
    except CachefsError as error:
        return [f"other nodes cannot be asked: {error}"], []
    reported = [
        f"node {member.name}: {line}"
        for member in members
        if member.counters is not None
        for line in member.counters.problems
    ]
    rails = [
        rail.problem
        for member in members
        if not member.traffic.cooling
        for rail in member.traffic.rails
        if rail.problem
    ]
    return reported, rails


def origin_variables(process: int) -> dict[str, str]:
    """Return the daemon's variables for access to origins; empty if this user may not see them."""
    try:
        content = Path(f"/proc/{process}/environ").read_bytes()
    except OSError:
        return {}
    pairs = (os.fsdecode(item).partition("=") for item in content.split(b"\0"))
    return {name: value for name, _, value in pairs if name.startswith(_ORIGIN_VARIABLES) or name.lower() in _PROXIES}


def process_account(process: int) -> ProcessAccount | None:
    """Return the user of a process; None if it is gone."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return None
    found = {name: values.split() for name, _, values in (line.partition(":") for line in lines)}
    return ProcessAccount(int(found["Uid"][1]), int(found["Gid"][1]), [int(group) for group in found["Groups"]])


def findings(facts: DaemonFacts, version: str, now: float) -> Iterator[Finding]:
    """Yield findings. version: of cachectl. now: Unix time."""
    if facts.status is None:
        yield _no_daemon_finding(facts)
        return
    status = facts.status
    yield ok(
        "daemon.answers",
        f"cachefsd {status.version} answers at {facts.socket} (pid {status.pid}, up "
        f"{format_duration(status.uptime)}), datasets: {status.datasets:,}",
    )
    if status.version != version:
        yield warning(
            "daemon.version",
            f"the daemon is of version {status.version}, cachectl of {version}",
            "daemon, mounts and commands of two versions are not tested together",
            "systemctl restart cachefsd after an upgrade",
        )
    for one in status.troubles:
        report = problem if one.waiting or is_failing(one.cause) or one.cause == Cause.TIER else warning
        yield report(
            f"daemon.{one.cause}", escape_name(describe_trouble(one, now)), describe_consequence(one), remedy(one)
        )
    if status.cluster.problem:
        yield warning(
            "daemon.cluster",
            f"the cluster: {escape_name(status.cluster.problem)}",
            "nodes may not see each other",
            "see cachectl cluster",
        )
    for line in facts.cluster[:MAX_LINES]:
        yield warning(
            "daemon.cluster_datasets",
            escape_name(line),
            "blocks may be read from the origin more often than once, or not be readable there",
            "cachectl cluster shows all, the log of that node says more",
        )
    for line in facts.rails[:MAX_LINES]:
        yield warning(
            "daemon.cluster_rails",
            escape_name(line),
            "blocks of that node come over its other network cards, and more slowly",
            "check the cable, the address and the route; cachectl cluster shows all",
        )
    recent = [error for error in status.errors if now - error.when < _RECENT]
    if recent:
        last = max(recent, key=lambda error: error.when)
        yield warning(
            "daemon.errors",
            f"{format_count(sum(error.count for error in recent), 'failure')}, "
            f"the last {format_duration(now - last.when)} ago: "
            f"{escape_name(last.message if last.subject in last.message else f'{last.subject}: {last.message}')}",
            "reads may have failed or waited",
            "cachectl errors shows all",
        )


def _no_daemon_finding(facts: DaemonFacts) -> Finding:
    away = "mounts serve cached blocks, and nothing can be fetched, mounted or published"
    if facts.is_stopped:
        return problem(
            "daemon.stopped", f"the daemon is stopped (process {facts.pid})", away, f"kill -CONT {facts.pid}"
        )
    if facts.refusal.startswith("you may not"):
        return problem(
            "daemon.rights",
            facts.refusal,
            "this user can neither query the daemon nor publish jobs; reads through a mount work",
            "the directories above the socket must let this user through "
            "(chmod o+x); see docs/operations.md#who-may-do-what",
        )
    if facts.refusal or not facts.pid:
        return problem(
            "daemon.answers",
            facts.refusal or f"no daemon listens at {facts.socket}",
            away,
            "start it (systemctl start cachefsd, or cachefsd), or name another socket with --socket; its log "
            "(journalctl -u cachefsd) says why it ended",
        )
    return problem(
        "daemon.answers",
        f"process {facts.pid} listens at {facts.socket}: {facts.error}",
        away,
        "see its log; a disk of state_dir that hangs holds it up",
    )


def missing_dataset_findings(names: Sequence[str], facts: DaemonFacts) -> Iterator[Finding]:
    """Yield findings for named datasets that do not exist."""
    known = {each.name for each in facts.datasets}
    for name in names:
        if facts.status is not None and name not in known:
            yield problem(
                "daemon.dataset",
                f"there is no dataset {escape_name(name)}",
                "no program can read it",
                "cachectl dataset list shows all; cachectl dataset add adds one",
            )
    if facts.status is None and names:
        yield note(
            "origin.skipped",
            f"datasets were named ({', '.join(map(escape_name, names[:4]))}), and no daemon answers",
            "their origins are not known, and were not asked",
        )
