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
from cachefs_tools.doctor.asking import Account, Asked, NoAnswer
from cachefs_tools.doctor.finding import Finding, note, problem

# The daemon's default (cachefs_daemon.config), which may not be installed here.
DEFAULT_CONFIG: Final = Path("/etc/cachefs/cachefsd.toml")
# Deadline of a check in seconds. Most take 0.1 s.
SECONDS: Final = 10.0
_SPEED_SECONDS: Final = 8.0
_NODE_SECONDS: Final = 60.0
_CREDENTIAL_SECONDS: Final = 30.0
_MOST_PROFILES: Final = 4

Report = Callable[[str], None]  # receives the subject that is being examined


@dataclass(frozen=True, slots=True)
class Wanted:
    """The subjects to examine."""

    socket: Path
    # The daemon's configuration file; None: that of the running daemon, else the system's, or the defaults.
    config: Path | None
    # Datasets whose origins are tested.
    datasets: Sequence[str] = ()
    all_origins: bool = False
    fstab: Path = fstab.FSTAB


@dataclass(frozen=True, slots=True)
class Name:
    """The identity used for origins: in words, its variables, and its user (None: this process's)."""

    words: str
    variables: Mapping[str, str]
    account: Account | None = None


@dataclass(slots=True)
class Examination:
    """The checks of one run of doctor, and their findings."""

    wanted: Wanted
    report: Report
    found: list[Finding] = field(default_factory=list)
    _children: list[Asked[Any]] = field(default_factory=list)

    def run(self) -> list[Finding]:
        """Return all findings, in the order of the checks. All children are ended, even after an interruption."""
        try:
            self._run()
        finally:
            for child in self._children:
                child.give_up()
        return self.found

    def _ask(
        self, module: str, argument: object, kind: type[Any], seconds: float, name: Name | None = None
    ) -> Asked[Any]:
        variables, account = (name.variables, name.account) if name is not None else (None, None)
        child: Asked[Any] = Asked(module, argument, kind, seconds, variables, account)
        self._children.append(child)
        return child

    def _run(self) -> None:
        config = self._configuration()
        self.report("daemon")
        facts = self._node(config)
        self.report("machine")
        budget = 0
        places = list(_places(config, facts.status))
        for place in places:
            budget = place.budget if place.name == disks.MEMORY else budget
        started = self._start(facts, places)
        name = asking_as(facts.pid)
        seen = self._answers(started, facts, budget)
        for each in seen:
            if each.place.name != disks.STATE and not each.error and each.nearest == each.place.directory:
                self.report(f"speed of the {each.place.name} tier")
                self._speed(each.place)
        self._origins(config, facts, name)

    def _configuration(self) -> configuration.ConfigFacts:
        file = str(self.wanted.config or DEFAULT_CONFIG)
        socket = "" if self.wanted.config is not None else str(self.wanted.socket)
        asked = self._ask("configuration", (file, socket), configuration.ConfigFacts, SECONDS)
        try:
            facts: configuration.ConfigFacts = asked.answer()
        except NoAnswer as error:
            self.found.append(
                problem(
                    "config.file",
                    f"{file} cannot be checked: {error}",
                    "a directory that the file names may be on a disk that hangs, and then the daemon hangs too",
                    "look at the disks, or servers, behind memory.dir, ssd.dir and state_dir",
                )
            )
            return configuration.ConfigFacts(file, True)
        self.found += configuration.findings(facts)
        return facts

    def _node(self, config: configuration.ConfigFacts) -> node.NodeFacts:
        given = self.wanted.socket
        # A named configuration file determines the socket, unless the user has set one.
        if self.wanted.config is not None and given == DEFAULT_SOCKET and config.socket:
            given = Path(config.socket)
        question = node.Question(str(given), list(self.wanted.datasets), self.wanted.all_origins)
        asked = self._ask("node", _builtins(question), node.NodeFacts, _NODE_SECONDS)
        try:
            facts: node.NodeFacts = asked.answer()
        except NoAnswer as error:
            facts = node.NodeFacts(str(given), error=str(error))
        self.found += node.findings(facts, __version__, time.time())
        self.found += node.without_datasets(self.wanted.datasets, facts)
        return facts

    def _start(self, facts: node.NodeFacts, places: Sequence[disks.Place]) -> dict[str, Asked[Any]]:
        """Start all checks that do not disturb each other."""
        started: dict[str, Asked[Any]] = {
            "kernel": self._ask("kernel", None, kernel.KernelFacts, SECONDS),
            "limits": self._ask("limits", facts.pid, limits.LimitFacts, SECONDS),
            "clock": self._ask("clock", None, clock.ClockFacts, SECONDS),
            "mounts": self._ask("mounts", None, list[mounts.MountFacts], mounts.ANSWER_SECONDS + SECONDS),
            "fstab": self._ask("fstab", str(self.wanted.fstab), fstab.FstabFacts, SECONDS),
        }
        for place in places:
            started[f"disks.{place.name}"] = self._ask("disks", _builtins(place), disks.DiskFacts, SECONDS)
        return started

    def _answers(self, started: dict[str, Asked[Any]], facts: node.NodeFacts, budget: int) -> list[disks.DiskFacts]:
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
        for name, asked in started.items():
            group, _, part = name.partition(".")
            try:
                answer = asked.answer()
            except NoAnswer as error:
                self._silent(name, str(error))
                continue
            if part:
                seen.append(answer)
                self.found += disks.findings(answer)
            else:
                self.found += made[group](answer)
        self.found += disks.shared(seen)
        return seen

    def _silent(self, name: str, why: str) -> None:
        if name.startswith("disks."):
            self.found.append(
                problem(
                    name,
                    f"the directory of {name.partition('.')[2]}: {why}",
                    "reads and writes there hang too",
                    "look at the disk, or the server, behind it",
                )
            )
        else:
            self.found.append(note(name, f"nothing is known of {name}: {why}"))

    def _speed(self, place: disks.Place) -> None:
        try:
            facts = self._ask("speed", place.directory, speed.SpeedFacts, _SPEED_SECONDS).answer()
        except NoAnswer as error:
            facts = speed.SpeedFacts(error=str(error))
        self.found += speed.findings(place.name, place.directory, facts)

    def _origins(self, config: configuration.ConfigFacts, facts: node.NodeFacts, asker: Name) -> None:
        options = dict(facts.options)
        s3 = [each.name for each in facts.datasets if each.url.startswith("s3://")]
        if s3:
            self._credentials([options[name] for name in s3 if name in options], asker)
        names = [each.name for each in facts.datasets] if self.wanted.all_origins else list(self.wanted.datasets)
        for number, name in enumerate(names):
            if number >= node.MOST_DATASETS:
                self.found.append(
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
            question = origins.Question(
                name, view.path, options.get(name, OriginOptions()), config.connect_timeout, config.read_timeout
            )
            self._origin(question, asker)

    def _credentials(self, used: Sequence[OriginOptions], asker: Name) -> None:
        if used and all(each.anonymous for each in used):
            self.found.append(credentials.skipped("all datasets asked for are anonymous"))
            return
        profiles = sorted({each.profile or "" for each in used if not each.anonymous}) or [""]
        for profile in profiles[:_MOST_PROFILES]:
            self.report("credentials")
            asked = self._ask("credentials", profile, credentials.CredentialFacts, _CREDENTIAL_SECONDS, asker)
            try:
                self.found += credentials.findings(asked.answer(), asker.words)
            except NoAnswer as error:
                self.found.append(credentials.skipped(str(error)))

    def _origin(self, question: origins.Question, asker: Name) -> None:
        asked = self._ask("origins", _builtins(question), origins.OriginFacts, origins.LOOK.seconds + SECONDS, asker)
        try:
            self.found += origins.findings(asked.answer(), asker.words)
        except NoAnswer as error:
            self.found.append(note("origin.skipped", f"the origin of dataset {question.dataset}: {error}"))


def _places(config: configuration.ConfigFacts, status: Status | None) -> Iterator[disks.Place]:
    """Yield directories from the daemon, or else from the configuration. Only the configuration has min_free."""
    if status is None:
        yield from config.places
        return
    free = {each.directory: each.min_free for each in config.places}
    for tier in status.tiers:
        yield disks.Place(tier.name, tier.directory, tier.budget, tier.used, free.get(tier.directory))
    yield disks.Place(disks.STATE, status.state_dir)


def asking_as(daemon: int) -> Name:
    """Return the daemon's identity if it can be used, else the user's. daemon: its process id; 0: not running."""
    variables = node.environment_of(daemon) if daemon else {}
    if variables and os.geteuid() == 0:
        # Files that the daemon's user cannot read are of no use to the daemon; and a program that its variables or
        # files name must not run as root.
        account = node.account_of(daemon)
        if account is not None and (account.user == 0 or account.can_ask()):
            return Name("with the daemon's environment", variables, account if account.user else None)
        variables = {}
    return Name("with the daemon's environment" if variables else "with your environment, not the daemon's", variables)


def _builtins(question: Any) -> Any:
    import msgspec

    return msgspec.to_builtins(question)
