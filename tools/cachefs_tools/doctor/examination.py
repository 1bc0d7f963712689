"""Runs all checks, each with a deadline, in an order in which none disturbs another."""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from cachefs import __version__
from cachefs.messages import OriginOptions, Status
from cachefs.socket_path import DEFAULT_SOCKET
from cachefs_tools.doctor import (
    clock,
    configuration,
    credentials,
    disks,
    fstab,
    kernel,
    limits,
    mounts,
    node,
    origins,
    speed,
)
from cachefs_tools.doctor.fact_child import FactChild, NoFacts, ProcessAccount
from cachefs_tools.doctor.finding import Finding, note, problem

# The daemon's default (cachefs_daemon.config), which may not be installed here.
DEFAULT_CONFIG: Final = Path("/etc/cachefs/cachefsd.toml")
# Deadline of a check in seconds. Most take 0.1 s.
CHECK_SECONDS: Final = 10.0
_SPEED_SECONDS: Final = 8.0
_NODE_SECONDS: Final = 60.0
_CREDENTIAL_SECONDS: Final = 30.0
_MAX_PROFILES: Final = 4

Report = Callable[[str], None]  # receives the subject that is being examined


@dataclass(frozen=True, slots=True)
class ExaminationRequest:
    """The subjects to examine."""

    socket: Path
    # The daemon's configuration file; None: that of the running daemon, else the system's, or the defaults.
    config: Path | None
    # Datasets whose origins are tested.
    datasets: Sequence[str] = ()
    all_origins: bool = False
    fstab: Path = fstab.FSTAB


@dataclass(frozen=True, slots=True)
class OriginIdentity:
    """The identity used for origins: in words, its variables, and its user (None: this process's)."""

    words: str
    variables: Mapping[str, str]
    account: ProcessAccount | None = None


@dataclass(slots=True)
class Examination:
    """The checks of one run of doctor, and their findings."""

    request: ExaminationRequest
    report: Report
    findings: list[Finding] = field(default_factory=list)
    _children: list[FactChild[Any]] = field(default_factory=list)

    def run(self) -> list[Finding]:
        """Return all findings, in the order of the checks. All children are ended, even after an interruption."""
        try:
            self._run()
        finally:
            for child in self._children:
                child.kill()
        return self.findings

    def _start_child(
        self, module: str, argument: object, kind: type[Any], seconds: float, name: OriginIdentity | None = None
    ) -> FactChild[Any]:
        variables, account = (name.variables, name.account) if name is not None else (None, None)
        child: FactChild[Any] = FactChild(module, argument, kind, seconds, variables, account)
        self._children.append(child)
        return child

    def _run(self) -> None:
        config = self._configuration()
        self.report("daemon")
        facts = self._node(config)
        self.report("machine")
        budget = 0
        directories = list(_daemon_directories(config, facts.status))
        for directory in directories:
            budget = directory.budget if directory.name == disks.MEMORY else budget
        started = self._start_checks(facts, directories)
        name = origin_identity(facts.pid)
        seen = self._collect_findings(started, facts, budget)
        for each in seen:
            if each.target.name != disks.STATE and not each.error and each.nearest == each.target.directory:
                self.report(f"speed of the {each.target.name} tier")
                self._speed(each.target)
        self._origins(config, facts, name)

    def _configuration(self) -> configuration.ConfigFacts:
        file = str(self.request.config or DEFAULT_CONFIG)
        socket = "" if self.request.config is not None else str(self.request.socket)
        child = self._start_child("configuration", (file, socket), configuration.ConfigFacts, CHECK_SECONDS)
        try:
            facts: configuration.ConfigFacts = child.wait_for_facts()
        except NoFacts as error:
            self.findings.append(
                problem(
                    "config.file",
                    f"{file} cannot be checked: {error}",
                    "a directory that the file names may be on a disk that hangs, and then the daemon hangs too",
                    "look at the disks, or servers, behind memory.dir, ssd.dir and state_dir",
                )
            )
            return configuration.ConfigFacts(file, True)
        self.findings += configuration.findings(facts)
        return facts

    def _node(self, config: configuration.ConfigFacts) -> node.DaemonFacts:
        socket = self.request.socket
        # A named configuration file determines the socket, unless the user has set one.
        if self.request.config is not None and socket == DEFAULT_SOCKET and config.socket:
            socket = Path(config.socket)
        query = node.NodeQuery(str(socket), list(self.request.datasets), self.request.all_origins)
        child = self._start_child("node", _builtins(query), node.DaemonFacts, _NODE_SECONDS)
        try:
            facts: node.DaemonFacts = child.wait_for_facts()
        except NoFacts as error:
            facts = node.DaemonFacts(str(socket), error=str(error))
        self.findings += node.findings(facts, __version__, time.time())
        self.findings += node.missing_dataset_findings(self.request.datasets, facts)
        return facts

    def _start_checks(
        self, facts: node.DaemonFacts, directories: Sequence[disks.DaemonDirectory]
    ) -> dict[str, FactChild[Any]]:
        """Start all checks that do not disturb each other."""
        started: dict[str, FactChild[Any]] = {
            "kernel": self._start_child("kernel", None, kernel.KernelFacts, CHECK_SECONDS),
            "limits": self._start_child("limits", facts.pid, limits.LimitFacts, CHECK_SECONDS),
            "clock": self._start_child("clock", None, clock.ClockFacts, CHECK_SECONDS),
            "mounts": self._start_child(
                "mounts", None, list[mounts.MountFacts], mounts.RESPONSE_SECONDS + CHECK_SECONDS
            ),
            "fstab": self._start_child("fstab", str(self.request.fstab), fstab.FstabFacts, CHECK_SECONDS),
        }
        for directory in directories:
            started[f"disks.{directory.name}"] = self._start_child(
                "disks", _builtins(directory), disks.DiskFacts, CHECK_SECONDS
            )
        return started

    def _collect_findings(
        self, started: dict[str, FactChild[Any]], facts: node.DaemonFacts, budget: int
    ) -> list[disks.DiskFacts]:
        """Add the findings of the started checks. Returns the facts about directories."""
        names = {each.name for each in facts.datasets} if facts.status is not None else None
        views = facts.status.mounts if facts.status is not None else None
        made: dict[str, Callable[[Any], Iterator[Finding]]] = {
            "kernel": kernel.findings,
            "limits": lambda found: limits.findings(found, budget),
            "clock": lambda found: clock.findings(found, time.time() - time.monotonic()),
            "mounts": lambda found: mounts.findings(found, views, __version__),
            "fstab": lambda found: fstab.findings(found, names),
        }
        seen: list[disks.DiskFacts] = []
        for name, child in started.items():
            group, _, part = name.partition(".")
            try:
                check_facts = child.wait_for_facts()
            except NoFacts as error:
                self._add_unknown(name, str(error))
                continue
            if part:
                seen.append(check_facts)
                self.findings += disks.findings(check_facts)
            else:
                self.findings += made[group](check_facts)
        self.findings += disks.shared_findings(seen)
        return seen

    def _add_unknown(self, name: str, why: str) -> None:
        if name.startswith("disks."):
            self.findings.append(
                problem(
                    name,
                    f"the directory of {name.partition('.')[2]}: {why}",
                    "reads and writes there hang too",
                    "look at the disk, or the server, behind it",
                )
            )
        else:
            self.findings.append(note(name, f"nothing is known of {name}: {why}"))

    def _speed(self, directory: disks.DaemonDirectory) -> None:
        try:
            facts = self._start_child("speed", directory.directory, speed.SpeedFacts, _SPEED_SECONDS).wait_for_facts()
        except NoFacts as error:
            facts = speed.SpeedFacts(error=str(error))
        self.findings += speed.findings(directory.name, directory.directory, facts)

    def _origins(self, config: configuration.ConfigFacts, facts: node.DaemonFacts, asker: OriginIdentity) -> None:
        options = dict(facts.options)
        s3 = [each.name for each in facts.datasets if each.url.startswith("s3://")]
        if s3:
            self._credentials([options[name] for name in s3 if name in options], asker)
        names = [each.name for each in facts.datasets] if self.request.all_origins else list(self.request.datasets)
        for number, name in enumerate(names):
            if number >= node.MAX_DATASETS:
                self.findings.append(
                    note(
                        "origin.skipped",
                        f"{len(names) - number:,} more datasets were not asked for",
                        "",
                        "name those that matter: cachectl doctor NAME",
                    )
                )
                break
            view = next((each for each in facts.datasets if each.name == name), None)
            if view is None:
                continue
            self.report(f"origin of {name}")
            query = origins.OriginQuery(
                name, view.path, options.get(name, OriginOptions()), config.connect_timeout, config.read_timeout
            )
            self._origin(query, asker)

    def _credentials(self, used: Sequence[OriginOptions], asker: OriginIdentity) -> None:
        if used and all(each.anonymous for each in used):
            self.findings.append(credentials.skipped_finding("all datasets asked for are anonymous"))
            return
        profiles = sorted({each.profile or "" for each in used if not each.anonymous}) or [""]
        for profile in profiles[:_MAX_PROFILES]:
            self.report("credentials")
            child = self._start_child("credentials", profile, credentials.CredentialFacts, _CREDENTIAL_SECONDS, asker)
            try:
                self.findings += credentials.findings(child.wait_for_facts(), asker.words)
            except NoFacts as error:
                self.findings.append(credentials.skipped_finding(str(error)))

    def _origin(self, query: origins.OriginQuery, asker: OriginIdentity) -> None:
        child = self._start_child(
            "origins", _builtins(query), origins.OriginFacts, origins.DEFAULT_BOUNDS.seconds + CHECK_SECONDS, asker
        )
        try:
            self.findings += origins.findings(child.wait_for_facts(), asker.words)
        except NoFacts as error:
            self.findings.append(note("origin.skipped", f"the origin of dataset {query.dataset}: {error}"))


def _daemon_directories(config: configuration.ConfigFacts, status: Status | None) -> Iterator[disks.DaemonDirectory]:
    """Yield directories from the daemon, or else from the configuration. Only the configuration has min_free."""
    if status is None:
        yield from config.directories
        return
    free = {each.directory: each.min_free for each in config.directories}
    for tier in status.tiers:
        yield disks.DaemonDirectory(tier.name, tier.directory, tier.budget, tier.used, free.get(tier.directory))
    yield disks.DaemonDirectory(disks.STATE, status.state_dir)


def origin_identity(daemon: int) -> OriginIdentity:
    """Return the daemon's identity if it can be used, else the user's. daemon: its process id; 0: not running."""
    variables = node.origin_variables(daemon) if daemon else {}
    if variables and os.geteuid() == 0:
        # Files that the daemon's user cannot read are of no use to the daemon; and a program that its variables or
        # files name must not run as root.
        account = node.process_account(daemon)
        if account is not None and (account.user == 0 or account.can_run_child()):
            return OriginIdentity("with the daemon's environment", variables, account if account.user else None)
        variables = {}
    return OriginIdentity(
        "with the daemon's environment" if variables else "with your environment, not the daemon's", variables
    )


def _builtins(query: Any) -> Any:
    import msgspec

    return msgspec.to_builtins(query)
