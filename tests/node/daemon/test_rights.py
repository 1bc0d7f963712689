"""Who may make which call: a real daemon, and callers that are really other users."""

import grp
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from cachefs.errors import AccessDenied, DaemonUnavailable, Unidentified
from cachefs.identity import UNKNOWN_USER_PREFIX, identity_socket_path, request_identity
from cachefs.job_messages import JobName, JobProgress
from cachefs.rpc import JOB_CANCEL, JOB_LIST, JOB_PROGRESS, JOB_SHOW, METHODS, AccessRight, DaemonClient, Method
from cachefs_daemon.api.identity import CallerRights, Identities
from cachefs_daemon.api.server import CallAuthorizer
from tests.as_user import NOBODY, as_user, public_directory
from tests.cachectl import CachectlOfUser
from tests.cachectl import cachectl as cachectl_of_root
from tests.daemon import Daemon
from tests.mounting import mounted
from tests.waiting import until

CACHEFS = [sys.executable, "-c", "from cachefs.cli import main; main()"]
ADMINS, MOUNTERS = "games", "audio"
OTHER = 4321  # neither root nor NOBODY
# Who calls, and which rights that gives.
CALLERS = {
    "root": (0, (), set(AccessRight)),
    "anybody": (NOBODY, (), {AccessRight.LOOK, AccessRight.JOB}),
    "a mounter": (NOBODY, (MOUNTERS,), {AccessRight.LOOK, AccessRight.JOB, AccessRight.MOUNT}),
    "an administrator": (NOBODY, (ADMINS,), set(AccessRight)),
}
# Makes every call of the interface with values that mean nothing, and prints the name of the error of each.
CALL_ALL = """
import json, sys, msgspec
from pathlib import Path
from cachefs.errors import CachefsError
from cachefs.rpc import METHODS, DaemonClient
from tests.fetching import FetchClient
NOTHING = {str: "none", int: 0, float: 0.0, bytes: b"", bool: False}
client, said = DaemonClient(Path(sys.argv[1])), {}
for method in METHODS:
    needed = {f.name: NOTHING.get(f.type, []) for f in msgspec.structs.fields(method.request) if f.required}
    try:
        if method.is_streaming:
            # A pusher would wait for orders.
            seconds = float(sys.argv[2]) if method.name == "Push" else 30
            next(iter(client.stream_responses(method, method.request(**needed), timeout=seconds)), None)
        else:
            client.call(method, method.request(**needed), timeout=30)
        said[method.name] = "done"
    except CachefsError as error:
        said[method.name] = type(error).__name__
try:
    FetchClient(Path(sys.argv[1])).close()
    said["fetch channel"] = "done"
except CachefsError as error:
    said["fetch channel"] = type(error).__name__
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def home() -> Iterator[Path]:
    with public_directory() as directory:
        yield directory


@pytest.fixture(scope="module")
def daemon(home: Path) -> Iterator[Daemon]:
    (home / "origin").mkdir()
    for number in range(20):
        (home / "origin" / f"{number}.bin").write_bytes(bytes(100))
    settings = {
        "daemon": {"block_size": "128KiB", "socket_group": MOUNTERS},
        "security": {"admin_group": ADMINS},
        "memory": {"budget": "4MiB", "segment_size": "1MiB"},
    }
    with Daemon(home / "node", settings) as running:
        running.add_dataset("numbers", f"file://{home}/origin")
        yield running


def groups(names: tuple[str, ...]) -> list[int]:
    return [grp.getgrnam(name).gr_gid for name in names]


class Users:
    """Who calls cachectl: root in the process of the test, each other user in a process of its own."""

    def __init__(self, socket: Path, others: dict[int, CachectlOfUser]) -> None:
        self._socket = socket
        self._others = others

    def cachectl(self, *words: str, uid: int = NOBODY) -> subprocess.CompletedProcess[str]:
        return self._others[uid](*words) if uid else cachectl_of_root(self._socket, *words)

    def publish(self, job: str, uid: int) -> subprocess.CompletedProcess[str]:
        return self.cachectl("job", "publish", job, "numbers", "--sampler", "sequential", "--epochs", "3", uid=uid)


@pytest.fixture(scope="module")
def users(daemon: Daemon) -> Iterator[Users]:
    with ExitStack() as stack:
        others = {uid: stack.enter_context(CachectlOfUser(daemon.socket, uid)) for uid in (NOBODY, OTHER)}
        yield Users(daemon.socket, others)


def jobs(daemon: Daemon) -> set[str]:
    return {view.job for view in daemon.client.call(JOB_LIST, JOB_LIST.request()).jobs}


@pytest.mark.parametrize("who", CALLERS)
def test_every_call_is_allowed_or_refused_as_the_table_says(daemon: Daemon, who: str) -> None:
    uid, names, rights = CALLERS[who]
    command = [*as_user(uid, groups(names)), sys.executable, "-c", CALL_ALL, str(daemon.socket)]
    command.append("1" if AccessRight.MOUNT in rights else "30")
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    refused = {name for name, error in said.items() if error in ("AccessDenied", "Unidentified")}
    assert refused == {
        *(method.name for method in METHODS if method.right not in rights),
        *({"fetch channel"} if AccessRight.MOUNT not in rights else ()),
    }


def test_without_an_identity_one_may_only_look(tmp_path: Path) -> None:
    door = CallAuthorizer(Identities(tmp_path / "s.id", CallerRights(0)), CallerRights(0))
    other = Identities(tmp_path / "other.id", CallerRights(0))
    root = CallerRights(0).caller_of(0, {0})

    class Context:
        said: tuple[tuple[str, str], ...] = ()

        def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
            return self.said

    def allowed(method: Method, said: str) -> bool:  # type: ignore[type-arg]
        context = Context()
        context.said = (("cachefs-identity", said),) if said else ()
        try:
            door.authorize_call(method, context)
        except Unidentified:
            return False
        return True

    ordinary = door.identities.issue(CallerRights(0).caller_of(NOBODY, set()))
    forged = door.identities.issue(CallerRights(0).caller_of(NOBODY, set())).replace(f"{NOBODY}.0.0.0", "0.1.1.1")
    for method in METHODS:
        look = method.right == AccessRight.LOOK
        for said in (
            "",
            UNKNOWN_USER_PREFIX,
            UNKNOWN_USER_PREFIX + ordinary,
            forged,
            other.issue(root),
            "x",
            ".",
            "0.1.1.1.",
            "\u00e9.\u00e9",
        ):
            assert allowed(method, said) == look, (method.name, said)
        assert allowed(method, door.identities.issue(root))


def test_an_ordinary_user_is_refused_in_one_line(users: Users) -> None:
    for words in (
        ("dataset", "add", "secrets", "file:///root"),
        ("dataset", "rm", "numbers", "--yes"),
        ("evict", "numbers", "--yes"),
        ("pin", "numbers"),
        ("warmup", "numbers"),
        ("verify",),
    ):
        done = users.cachectl(*words)
        assert done.returncode == 1, words
        [line] = done.stderr.splitlines()
        assert f"user {NOBODY} may not call " in line
        assert f"only root, or a member of group {ADMINS} may" in line
    looking = (
        *(("status",), ("errors",), ("mounts",), ("job", "list"), ("stalls",), ("dataset", "list")),
        *(("dataset", "show", "numbers"), ("ls", "numbers", "--cached"), ("ls", "numbers", "--json")),
    )
    for words in looking:
        done = users.cachectl(*words)
        assert (done.returncode, done.stderr) == (0, ""), words
    entries = json.loads(done.stdout)["entries"]
    assert len(entries) == 20
    assert entries[0] == {"name": "0.bin", "directory": False, "size": 100}


def test_each_user_has_jobs_of_its_own(users: Users, daemon: Daemon) -> None:
    assert users.publish("train", uid=0).returncode == 0
    assert users.publish("train", uid=NOBODY).returncode == 0
    root = daemon.client.call(JOB_SHOW, JobName(job="train"))
    assert root.job == "train"
    assert {"train", f"train~{NOBODY}"} <= jobs(daemon)
    # A user may give way, and take nothing from the jobs of others.
    assert users.cachectl("job", "priority", "train", "0.5").returncode == 0
    assert daemon.client.call(JOB_SHOW, JobName(job=f"train~{NOBODY}")).weight == 0.5
    assert "only administrators" in users.cachectl("job", "priority", "train", "2").stderr
    # Theirs is cancelled by the name that they gave it, and root's lives on.
    assert users.cachectl("job", "cancel", "train").returncode == 0
    assert daemon.client.call(JOB_SHOW, JobName(job="train")).state == "running"
    assert daemon.client.call(JOB_SHOW, JobName(job=f"train~{NOBODY}")).state == "cancelled"


def test_users_are_told_the_names_that_they_gave(users: Users) -> None:
    assert users.publish("named", uid=NOBODY).returncode == 0
    assert users.cachectl("job", "show", "named").stdout.startswith("named: running")
    for uid in (0, OTHER):
        assert users.cachectl("job", "show", "named", uid=uid).stdout.startswith(f"named~{NOBODY}: running")
        assert f"named~{NOBODY} " in users.cachectl("job", "list", uid=uid).stdout
    publishing = ("job", "publish", "named", "numbers", "--sampler", "sequential", "--rank", "5")
    for words in (publishing, ("job", "publish", "a/b", *publishing[3:]), ("job", "show", "no"), ("stalls", "no")):
        done = users.cachectl(*words)
        assert done.returncode == 1
        assert "~" not in done.stderr, words
    assert "'no~1'" in users.cachectl("job", "show", "no~1").stderr


def test_nobody_cancels_anothers_job(users: Users, daemon: Daemon) -> None:
    assert users.publish("roots", uid=0).returncode == 0
    assert users.publish("users", uid=OTHER).returncode == 0
    for name in ("roots", "users", f"users~{OTHER}"):
        done = users.cachectl("job", "cancel", name)
        assert done.returncode == 1
        assert "is another user's" in done.stderr
    assert users.publish(f"users~{OTHER}", uid=NOBODY).returncode == 1
    assert daemon.client.call(JOB_SHOW, JobName(job="roots")).state == "running"
    daemon.client.call(JOB_CANCEL, JobName(job="users"))  # an administrator may, and the name is that of only one job
    assert daemon.client.call(JOB_SHOW, JobName(job=f"users~{OTHER}")).state == "cancelled"


def test_who_may_not_unmount_is_told_who_may(daemon: Daemon, home: Path) -> None:
    # The user's process begins when the mount is there: its mounts may be its own.
    with mounted(daemon.socket, "numbers", home / "mnt") as mount, CachectlOfUser(daemon.socket, NOBODY) as cachectl:
        for lazy in ((), ("--lazy",)):
            done = cachectl("umount", str(mount), *lazy)
            assert done.returncode == 1
            [line] = done.stderr.splitlines()
            assert "it takes root, or the user who mounted it" in line
            assert "--lazy" not in line
        shown = cachectl("stats", str(mount), "--count", "1")
        assert (shown.returncode, shown.stderr) == (0, "")
        assert os.listdir(mount)


def test_the_control_file_reaches_no_job_of_a_user(users: Users, daemon: Daemon, tmp_path: Path) -> None:
    assert users.publish("fit", uid=0).returncode == 0
    stranger = DaemonClient(daemon.socket, for_unknown_user=True)
    with pytest.raises(AccessDenied, match="another user's"):
        stranger.call(JOB_CANCEL, JobName(job="fit"))
    stranger.close()
    with mounted(daemon.socket, "numbers", tmp_path / "mnt") as mount:
        end = {"op": "progress", "job": "fit", "ended": True}
        begin = {"op": "publish", "job": "fit", "sampler": {"kind": "sequential", "size": 20}}
        (mount / ".cachefs/publish").write_text(f"{json.dumps(end)}\n{json.dumps(begin)}\n{json.dumps(end)}\n")
        until(lambda: "fit~control" in jobs(daemon))
    assert daemon.client.call(JOB_SHOW, JobName(job="fit")).state == "running"


def test_cachefs_run_works_for_an_ordinary_user(daemon: Daemon, home: Path) -> None:
    with mounted(daemon.socket, "numbers", home / "mnt") as mount:
        script = (
            "import cachefs, sys, time\n"
            f"p = cachefs.publish({str(mount)!r}, sampler=cachefs.SamplerSpec(kind='sequential', size=20))\n"
            "sys.stdin.read()\n"
        )
        command = [*as_user(NOBODY), *CACHEFS, "run", "--quiet", "--socket", str(daemon.socket)]
        with subprocess.Popen(
            [*command, "--job", "mine", "--", sys.executable, "-c", script],
            stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd="/",
        ) as job:  # fmt: skip
            try:
                until(lambda: f"mine~{NOBODY}" in jobs(daemon))
            finally:
                assert job.stdin is not None
                job.stdin.close()
            assert job.stderr is not None
            assert job.stderr.read() == ""


def test_a_client_says_anew_who_it_is_to_a_new_daemon(tmp_path: Path) -> None:
    with Daemon(tmp_path / "node") as daemon:
        client = DaemonClient(daemon.socket)
        with pytest.raises(Exception, match="no job named"):
            client.call(JOB_SHOW, JobName(job="x"))
        before = request_identity(daemon.socket)
        assert daemon.stop() == 0
        daemon.start()
        assert request_identity(daemon.socket) != before
        with pytest.raises(Exception, match="no job named"):
            client.call(JOB_PROGRESS, JobProgress(job="x", consumer="0", epoch=0, position=0))
        client.close()
        os.unlink(identity_socket_path(daemon.socket))
        identity_socket_path(daemon.socket).touch()  # else the daemon would make it again
        fresh = DaemonClient(daemon.socket)
        with pytest.raises(Unidentified, match="cannot be reached"):
            fresh.call(JOB_SHOW, JobName(job="x"))
        fresh.close()


def test_a_daemon_that_has_gone_meanwhile_is_waited_for_and_refuses_nobody(tmp_path: Path) -> None:
    """It was killed between its answer "who are you?" and the question for an identity."""
    with Daemon(tmp_path / "node") as daemon, socket.socket(socket.AF_UNIX) as nobody_listens:
        os.unlink(identity_socket_path(daemon.socket))
        nobody_listens.bind(str(identity_socket_path(daemon.socket)))
        client = DaemonClient(daemon.socket)
        with pytest.raises(DaemonUnavailable, match="has ended"):
            client.call(JOB_SHOW, JobName(job="x"))
        client.close()
