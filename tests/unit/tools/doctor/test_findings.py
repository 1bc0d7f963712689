"""What is made of facts: each check as a function of what was found."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from rich.console import Console

from cachefs.messages import ErrorView, MountView
from cachefs_daemon.config import DEFAULT_PATH
from cachefs_tools.cachectl.doctor import describe, summary
from cachefs_tools.doctor import clock, credentials, disks, fstab, kernel, limits, mounts, node, origins, speed
from cachefs_tools.doctor.examination import DEFAULT_CONFIG
from cachefs_tools.doctor.fact_child import FactChild, ProcessAccount
from cachefs_tools.doctor.finding import Finding, Level
from cachefs_tools.origin_speed import ConcurrentThroughput, OriginSpeed

GB = 10**9


@dataclass(frozen=True)
class Case:
    """Facts that differ from good ones in some fields, and the check that must say so."""

    name: str
    level: Level
    told: str = ""  # part of the finding's texts


def levels(found: Iterable[Finding]) -> dict[str, Level]:
    return {each.id: each.level for each in found}


def the(found: Iterable[Finding], case: Case) -> None:
    """There is a finding as the case says, and it has a way out where something is wrong."""
    every = list(found)
    chosen = [each for each in every if each.id == case.name and each.level is case.level]
    assert chosen, every
    assert any(case.told in " ".join((each.found, each.consequence, each.way_out)) for each in chosen), chosen
    for each in every:
        if each.level in (Level.PROBLEM, Level.WARNING):
            assert each.consequence, each
            assert each.way_out, each
        assert "\n" not in each.found + each.consequence + each.way_out


KERNEL = kernel.KernelFacts("6.18.4", "ok", ["fuse", "fusectl", "overlay"], True, True, True)


@pytest.mark.parametrize(
    ("changes", "case"),
    [
        ({}, Case("kernel.version", Level.OK)),
        ({"release": "6.8.0-40-generic"}, Case("kernel.resend", Level.WARNING, "6.9")),
        ({"release": "6.1.0"}, Case("kernel.page_cache", Level.WARNING, "6.5")),
        ({"release": "4.19"}, Case("kernel.zero_open", Level.WARNING, "5.1")),
        ({"release": "odd"}, Case("kernel.zero_open", Level.WARNING)),
        ({"device": "missing"}, Case("fuse.device", Level.PROBLEM, "--device /dev/fuse")),
        ({"device": "denied"}, Case("fuse.device", Level.PROBLEM, "CAP_SYS_ADMIN")),
        ({"device": "denied", "is_root": False}, Case("fuse.device", Level.NOTE, "chmod")),
        ({"has_control": False, "may_mount": False}, Case("fuse.control", Level.WARNING, "fusectl")),
        ({"has_control": False, "may_mount": True}, Case("fuse.control", Level.OK)),
        ({"known": ["fuse"]}, Case("kernel.overlay", Level.NOTE, "modprobe overlay")),
        ({"is_root": False}, Case("fuse.fusermount", Level.PROBLEM, "fuse3")),
        ({"is_root": False, "fusermount": "/bin/fusermount3"}, Case("fuse.allow_other", Level.NOTE)),
        ({"is_root": False, "most_background": 12}, Case("fuse.background", Level.NOTE, "max_user_bgreq")),
        ({"lacking": "its C piece was not built"}, Case("fuse.python", Level.WARNING, "C piece")),
    ],
)
def test_kernel(changes: dict[str, Any], case: Case) -> None:
    the(kernel.findings(msgspec.structs.replace(KERNEL, **changes)), case)


LIMITS = limits.LimitFacts(1 << 20, True, 64 * GB, 32 * GB, 8)


@pytest.mark.parametrize(
    ("changes", "budget", "case"),
    [
        ({}, GB, Case("limits.files", Level.OK, "the daemon")),
        ({"files": 1024, "files_of_daemon": False}, GB, Case("limits.files", Level.NOTE, "this shell")),
        ({"files": 1024}, GB, Case("limits.files", Level.WARNING, "LimitNOFILE")),
        ({"files": 20_000}, GB, Case("limits.files", Level.NOTE, "LimitNOFILE")),
        ({"files": 1 << 62}, GB, Case("limits.files", Level.OK, "any number")),
        ({}, 65 * GB, Case("limits.memory", Level.WARNING, "memory.budget")),
        ({"groups": [(8 * GB, GB)]}, GB, Case("limits.cgroup", Level.NOTE)),
        ({"groups": [(8 * GB, GB)]}, 16 * GB, Case("limits.cgroup", Level.WARNING, "lower memory.budget")),
        ({"groups": [(80 * GB, GB), (8 * GB, 8 * GB)]}, GB, Case("limits.cgroup", Level.WARNING, "MemoryMax")),
    ],
)
def test_limits(changes: dict[str, Any], budget: int, case: Case) -> None:
    the(limits.findings(msgspec.structs.replace(LIMITS, **changes), budget), case)


def disk(name: str, **changes: Any) -> disks.DiskFacts:
    place = disks.DaemonDirectory(name, f"/x/{name}", changes.pop("budget", 100 * GB), changes.pop("used", 0), GB)
    kind = "tmpfs" if name == disks.MEMORY else "xfs"
    facts = disks.DiskFacts(place, place.directory, kind, 1000 * GB, 500 * GB, 7, False, False)
    return msgspec.structs.replace(facts, **changes)


@pytest.mark.parametrize(
    ("facts", "level", "told"),
    [
        (disk("memory"), Level.OK, "465.7 GiB free"),
        (disk("memory", kind="ext4"), Level.WARNING, "/dev/shm"),
        (disk("memory", size=64 << 20, free=64 << 20), Level.PROBLEM, "--shm-size"),
        (disk("memory", free=2 * GB), Level.WARNING, "lower memory.budget"),
        (disk("memory", free=2 * GB, used=99 * GB), Level.OK, ""),
        (disk("ssd"), Level.OK, ""),
        (disk("ssd", kind="nfs4"), Level.PROBLEM, "no faster to read than from the origin"),
        (disk("ssd", kind="fuse.sshfs"), Level.PROBLEM, "local file system"),
        (disk("ssd", kind="tmpfs"), Level.WARNING, "empty after a restart"),
        (disk("ssd", kind="overlay"), Level.WARNING, "container"),
        (disk("ssd", is_root_disk=True), Level.NOTE, "require_mount"),
        (disk("ssd", missing_mount="/mnt/nvme"), Level.PROBLEM, "mount /mnt/nvme"),
        (disk("ssd", is_read_only=True), Level.PROBLEM, "read-only"),
        (disk("ssd", error="Permission denied"), Level.NOTE, "as root"),
        (disk("state"), Level.OK, ""),
        (disk("state", kind="nfs"), Level.PROBLEM, "index"),
        (disk("state", kind="tmpfs"), Level.WARNING, "a restart of the machine loses datasets"),
        (disk("state", free=GB), Level.WARNING, "no room"),
    ],
)
def test_disks(facts: disks.DiskFacts, level: Level, told: str) -> None:
    the(disks.findings(facts), Case(f"disks.{facts.target.name}", level, told))


def test_state_and_tier_on_one_disk() -> None:
    state, ssd = disk("state"), disk("ssd")
    assert levels(disks.shared_findings([state, ssd])) == {"disks.shared": Level.OK}
    greedy = msgspec.structs.replace(ssd, target=msgspec.structs.replace(ssd.target, min_free=0))
    assert levels(disks.shared_findings([state, greedy])) == {"disks.shared": Level.WARNING}
    unknown = msgspec.structs.replace(ssd, target=msgspec.structs.replace(ssd.target, min_free=None))
    assert levels(disks.shared_findings([state, unknown])) == {"disks.shared": Level.NOTE}
    assert not levels(disks.shared_findings([state, disk("ssd", device=8)]))
    assert not levels(disks.shared_findings([state]))


def test_speed() -> None:
    fast = speed.SpeedFacts(2e9, 5e9, 64 << 20)
    the(speed.findings("ssd", "/x", fast), Case("speed.ssd", Level.OK, "at this moment"))
    the(speed.findings("memory", "/x", speed.SpeedFacts(1e8, 2e8, 1)), Case("speed.memory", Level.WARNING, "bench"))
    the(speed.findings("ssd", "/x", speed.SpeedFacts(error="Permission denied")), Case("speed.ssd", Level.NOTE))


def test_clock() -> None:
    good = clock.ClockFacts(True, 0.01, 1000.0)
    the(clock.findings(good, 1000.01), Case("clock.synchronised", Level.OK))
    the(clock.findings(good, 1010.0), Case("clock.stepped", Level.WARNING, "+10.0 s"))
    the(clock.findings(clock.ClockFacts(False, 16.0, 0.0), 0.0), Case("clock.synchronised", Level.NOTE, "chronyd"))
    the(clock.findings(clock.ClockFacts(True, 600.0, 0.0), 0.0), Case("clock.synchronised", Level.WARNING, "600 s"))
    the(clock.findings(clock.ClockFacts(None, 0.0, 0.0), 0.0), Case("clock.synchronised", Level.NOTE, "not tell"))


def view(path: str, **changes: Any) -> MountView:
    return msgspec.structs.replace(MountView("1", path, "tree", 7, True, 0.0, {}, version="1.0"), **changes)


def test_mounts() -> None:
    fact = mounts.MountFacts
    the(mounts.findings([fact("/e", "t", "no way")], None, "1"), Case("mounts.error", Level.NOTE, "no way"))
    found = [fact("/a", "tree", mounts.RESPONDS), fact("/b\n", "tree", mounts.DEAD), fact("/c", "tree", mounts.HANGS)]
    every = list(mounts.findings(found, [view("/a", version="0.9"), view("/d", detached=True)], "1.0"))
    the(every, Case("mounts.dead", Level.PROBLEM, "cachectl umount /b\\n"))
    the(every, Case("mounts.hangs", Level.PROBLEM, "cachectl umount /c"))
    the(every, Case("mounts.version", Level.WARNING, "0.9"))
    the(every, Case("mounts.detached", Level.NOTE, "process 7"))
    the(every, Case("mounts.alive", Level.OK))
    the(mounts.findings([], None, "1.0"), Case("mounts.none", Level.NOTE))
    the(mounts.findings(found[:1], [], "1.0"), Case("mounts.unknown", Level.NOTE, "/a"))


def test_a_thousand_dead_mounts_are_counted() -> None:
    found = [mounts.MountFacts(f"/m/{number}", "tree", mounts.DEAD) for number in range(1000)]
    every = list(mounts.findings(found, None, "1.0"))
    assert len(every) < 20
    assert any("992 more" in each.found for each in every)


LINE = "cachefs:tree /data/tree cachefs defaults,_netdev,nofail,x-systemd.after=cachefsd.service 0 0"


@pytest.mark.parametrize(
    ("line", "case"),
    [
        (LINE, Case("fstab.lines", Level.OK)),
        (LINE.replace("cachefs:tree", "tree"), Case("fstab.source", Level.WARNING, "cachefs:tree")),
        (LINE.replace("_netdev,", ""), Case("fstab.netdev", Level.WARNING)),
        (LINE.replace("nofail,", ""), Case("fstab.nofail", Level.WARNING)),
        (LINE.replace(".after=", ".requires="), Case("fstab.requires", Level.WARNING, "x-systemd.after")),
        (LINE.replace(",x-systemd.after=cachefsd.service", ""), Case("fstab.after", Level.WARNING)),
        (LINE.replace("defaults", "defalts"), Case("fstab.options", Level.PROBLEM, "defalts")),
        (LINE.replace(":tree ", ":tre "), Case("fstab.dataset", Level.PROBLEM, "dataset add tre URL")),
        (LINE.replace("/data/tree", "/data/no"), Case("fstab.directory", Level.PROBLEM, "mkdir -p /data/no")),
        (LINE.replace(" cachefs ", " fuse.cachefs "), Case("fstab.type", Level.PROBLEM, "third field")),
        ("cachefs:tree /data/tree", Case("fstab.syntax", Level.PROBLEM, "2 fields")),
    ],
)
def test_fstab(line: str, case: Case) -> None:
    text = f"# cachefs:not /a cachefs defaults\n/dev/sda1 / ext4 defaults 0 1\n\n{line}\n"
    lines = fstab.cachefs_lines(text)
    assert [number for number, _ in lines] == [4]
    the(fstab.findings(fstab.FstabFacts(lines, True, ["/data/tree"]), ["tree"]), case)


def test_fstab_without_helper() -> None:
    facts = fstab.FstabFacts([(1, LINE)], False, ["/data/tree"])
    the(fstab.findings(facts, None), Case("fstab.helper", Level.PROBLEM, "install-mount-helper"))
    assert list(fstab.findings(fstab.FstabFacts(), None)) == []


@pytest.mark.parametrize(
    ("facts", "case"),
    [
        (
            node.DaemonFacts("/s", "there is no socket /s here"),
            Case("daemon.answers", Level.PROBLEM, "systemctl start"),
        ),
        (node.DaemonFacts("/s", "you may not use the socket /s of the daemon"), Case("daemon.rights", Level.PROBLEM)),
        (node.DaemonFacts("/s", pid=7, is_stopped=True), Case("daemon.stopped", Level.PROBLEM, "kill -CONT 7")),
        (node.DaemonFacts("/s", pid=7, error="late"), Case("daemon.answers", Level.PROBLEM, "late")),
    ],
)
def test_a_daemon_that_does_not_answer(facts: node.DaemonFacts, case: Case) -> None:
    the(node.findings(facts, "1.0", 0.0), case)


def test_errors_of_the_last_hour_are_told() -> None:
    from cachefs.messages import Status, TierStatus, Trouble

    tier = TierStatus(
        name="ssd", directory="/x", budget=1, limit=1, used=0, blocks=0, segments=0, hits=0, hit_bytes=0, evicted=0,
        policy="lru", problem="read-only",
    )  # fmt: skip
    status = Status(
        instance="i", version="0.9", pid=7, uptime=5.0, state_dir="/s", tiers=[tier], datasets=1, misses=0,
        fetched_blocks=0, fetched_bytes=0, origin_requests=0, origin_errors=0, in_flight_blocks=0, in_flight_bytes=0,
        repairs=0, mounts=[], warmups=0, index_blocks=0,
        errors=[ErrorView(100.0, 3, "s3://b/k", "refused"), ErrorView(9000.0, 2, "s3://b/\nk", "gone")],
        troubles=[
            Trouble("tier", "ssd", 9000.0, 9010.0, "takes no new blocks: read-only"),
            Trouble("origin", "S3 at x", 9000.0, 9008.0, "refused"),
        ],
    )  # fmt: skip
    lacks = "node b: dataset set: snapshot 12ab, which a reads, is not on this node"
    every = list(node.findings(node.DaemonFacts("/s", status=status, cluster=[lacks]), "1.0", 9010.0))
    rail = "node b at 10.78.0.2:7380 cannot be reached: No route to host"
    rails = list(node.findings(node.DaemonFacts("/s", status=status, rails=[rail]), "1.0", 9010.0))
    the(rails, Case("daemon.cluster_rails", Level.WARNING, rail))
    the(every, Case("daemon.cluster_datasets", Level.WARNING, "snapshot 12ab, which a reads, is not on this node"))
    the(every, Case("daemon.errors", Level.WARNING, "2 failures, the last 10 s ago: s3://b/\\nk: gone"))
    the(every, Case("daemon.version", Level.WARNING, "0.9"))
    the(every, Case("daemon.tier", Level.PROBLEM, "the ssd tier takes no new blocks: read-only"))
    the(every, Case("daemon.origin", Level.WARNING, "S3 at x did not answer the last request, 2 s ago"))


@pytest.mark.parametrize(
    ("facts", "level", "told"),
    [
        (credentials.CredentialFacts("", "env"), Level.OK, "environment variables"),
        (credentials.CredentialFacts("p", "iam-role", 3000.0, True), Level.OK, "renewed"),
        (credentials.CredentialFacts("p", "sso", 120.0), Level.WARNING, "2 min"),
        (credentials.CredentialFacts("p", "sso", -7200.0), Level.PROBLEM, "expired 2 h"),
        (credentials.CredentialFacts(), Level.WARNING, "cachefsd.env"),
        (credentials.CredentialFacts("p", error="ProfileNotFound"), Level.PROBLEM, "ProfileNotFound"),
    ],
)
def test_credentials(facts: credentials.CredentialFacts, level: Level, told: str) -> None:
    the(credentials.findings(facts, "the daemon"), Case("credentials.s3", level, told))


@pytest.mark.parametrize(
    ("facts", "case"),
    [
        (origins.OriginFacts("d", speed=OriginSpeed(0.02, 0.1, [ConcurrentThroughput(4, 1e8, 9.0)], 20, 99)),
         Case("origin.speed", Level.OK, "20.0 ms")),
        (origins.OriginFacts("d", speed=OriginSpeed(0.7, 1.0, [ConcurrentThroughput(4, 1e8, 9.0)], 20, 99)),
         Case("origin.speed", Level.WARNING)),
        (origins.OriginFacts("d", error="no such snapshot"), Case("origin.skipped", Level.NOTE)),
        (origins.OriginFacts("d"), Case("origin.empty", Level.NOTE)),
        (origins.OriginFacts("d", speed=OriginSpeed(error="ObjectChanged", message="gone")),
         Case("origin.changed", Level.WARNING, "dataset refresh d")),
        (origins.OriginFacts("d", speed=OriginSpeed(error="OriginAccessDenied", message="403")),
         Case("origin.refused", Level.PROBLEM)),
        (origins.OriginFacts("d", speed=OriginSpeed(error="OriginUnavailable", message="… set AWS_CA_BUNDLE …")),
         Case("origin.tls", Level.PROBLEM, "/etc/cachefs/cachefsd.env")),
        (origins.OriginFacts("d", speed=OriginSpeed(error="OriginUnavailable", message="no server answers")),
         Case("origin.unreachable", Level.PROBLEM)),
    ],
)  # fmt: skip
def test_origins(facts: origins.OriginFacts, case: Case) -> None:
    the(origins.findings(facts, "with your environment"), case)


def test_the_configuration_is_where_the_daemon_looks_for_it() -> None:
    assert DEFAULT_CONFIG == DEFAULT_PATH


def test_problems_come_first_and_lines_fit_80_columns() -> None:
    found = [
        Finding("a.b", Level.OK, "good " * 30),
        Finding("a.c", Level.PROBLEM, "bad", "hurts " * 30, "mend [it] " * 30),
        Finding("a.d", Level.WARNING, "x" * 200, "c", "w"),
    ]
    console = Console(width=80, markup=False)
    with console.capture() as captured:
        console.print(*describe(found), sep="\n")
    lines = captured.get().splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].strip() == "Problems"
    assert [line.strip() for line in lines if line and not line.startswith((" ", "x", "!", "+", "-"))] == [
        "Problems", "Warnings", "In order", "1 problem and 1 warning; 1 check is in order.",
    ]  # fmt: skip
    assert summary(found[:1]) == "Nothing is wrong; 1 check is in order."


def test_whose_the_daemon_is() -> None:
    account = node.process_account(os.getpid())
    assert account is not None
    assert (account.user, account.group, sorted(account.groups)) == (os.geteuid(), os.getegid(), sorted(os.getgroups()))
    assert node.process_account(1 << 30) is None
    if os.geteuid() == 0:
        assert account.can_run_child()


def test_a_child_runs_as_the_user_that_it_is_for() -> None:
    if os.geteuid() == 0:
        child: FactChild[Any] = FactChild("limits", None, limits.LimitFacts, 10.0, {}, ProcessAccount(0, 0, []))
        assert isinstance(child.wait_for_facts(), limits.LimitFacts)
