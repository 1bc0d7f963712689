"""`cachefs-scheduler open-gates`: pods that wait are let go where no replica of the service lives, and only there."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from cachefs_scheduler import config as scheduler_config
from cachefs_scheduler.cli import main
from cachefs_scheduler.kube import leader, open_gates, pod_controller
from cachefs_scheduler.kube.api import KubeApiUnavailable, Lease, LeaseSpec, connect
from cachefs_scheduler.kube.open_gates import GateOpening, LeaseWatch
from tests.advising import FakeAdvisor
from tests.scheduler.kube.manifests import DEPLOY, manifest
from tests.scheduler.kube.pods import pod
from tests.scheduler.kube.serving import serving
from tests.servers.api_server import ApiServer, running
from tests.waiting import until

ACCESS = DEPLOY / "base" / "open-gates.yaml"
GATE = {"name": "cachefs.io/copy-slot"}
OTHER = {"name": "example.com/quota"}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiServer]:
    for module, name, seconds in (
        (open_gates, "CHECK_SECONDS", 0.1), (open_gates, "ROUND_SECONDS", 0.1), (leader, "RENEW_SECONDS", 0.2),
        (pod_controller, "FIRST_PAUSE", 0.05), (pod_controller, "MAX_PAUSE", 0.2),
        (pod_controller, "PASS_SECONDS", 0.2),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, seconds)
    with running() as found:
        yield found


def wait(server: ApiServer, *names: str, gates: tuple[dict[str, str], ...] = (GATE,)) -> None:
    for name in names:
        made = pod(name, dataset="imagenet", policy="suspend")
        made["spec"]["schedulingGates"] = list(gates)
        server.make_pod(made)


def hold_lease(server: ApiServer) -> None:
    """As a replica has left it that died, with a clock that is far ahead."""
    spec = {"holderIdentity": "dead", "leaseDurationSeconds": 15, "renewTime": "2099-01-01T00:00:00.000000Z"}
    server._do(server._create("leases", "cachefs", {"metadata": {"name": "cachefs-scheduler"}, "spec": spec}))


def renew(server: ApiServer) -> None:
    server._do(
        server._change(
            ("leases", "cachefs", "cachefs-scheduler"),
            lambda found: found["spec"].update(renewTime="2099-01-01T00:00:01.000000Z"),
        )
    )


def gates(server: ApiServer, name: str) -> list[dict[str, str]]:
    return list(server.pod(name)["spec"].get("schedulingGates") or [])


def command(server: ApiServer, place: Path, *words: str) -> Result:
    return CliRunner().invoke(main, ["open-gates", "--api", str(server.kubeconfig(place / "kubeconfig")), *words])


def allow_what_the_manifest_does(server: ApiServer) -> None:
    server.rules = [rule for kind in ("ClusterRole", "Role") for rule in manifest(ACCESS, kind)["rules"]]


@pytest.mark.parametrize("lease", ["of a dead replica", "none"])
def test_pods_are_let_go_where_nobody_renews_the_lease(server: ApiServer, tmp_path: Path, lease: str) -> None:
    if lease != "none":
        hold_lease(server)
    wait(server, "one", "two")
    wait(server, "both", gates=(OTHER, GATE))
    wait(server, "other", gates=(OTHER,))
    allow_what_the_manifest_does(server)
    done = command(server, tmp_path, "--if-silent", "1s")
    assert (done.exit_code, done.output) == (0, "3 gates were opened\n")
    assert gates(server, "one") == gates(server, "two") == []
    assert gates(server, "both") == gates(server, "other") == [OTHER]


def test_a_replica_that_lives_keeps_its_gates_and_one_that_has_ended_does_not(
    server: ApiServer, tmp_path: Path
) -> None:
    advice = FakeAdvisor({"gpu-1": 1.0})
    advice.go = set()
    with _serving(server, tmp_path, advice):
        wait(server, "train")
        until(lambda: server.events("CachefsWaiting"))
        done = command(server, tmp_path, "--if-silent", "20s")
        assert (done.exit_code, done.output) == (
            0, "a replica of the service renews its Lease: it opens gates itself\n",
        )  # fmt: skip
        assert gates(server, "train") == [GATE]
    assert command(server, tmp_path, "--if-silent", "1s").output == "1 gate was opened\n"
    assert gates(server, "train") == []


def test_a_replica_that_cannot_follow_pods_gives_the_lease_up(
    server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would hold the gates of pods closed that it never sees."""
    monkeypatch.setattr(pod_controller, "GIVEN_UP_SECONDS", 1.0)
    advice = FakeAdvisor({"gpu-1": 1.0})
    advice.go = set()
    with _serving(server, tmp_path, advice):
        wait(server, "train")
        until(lambda: server.events("CachefsWaiting"))
        server.rules = [{"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": ["get", "update"]}]
        server.compact()  # its watch ends, and it may not begin another one
        until(lambda: not server.lease("cachefs-scheduler")["spec"].get("holderIdentity"))
        server.rules = None
        assert command(server, tmp_path, "--if-silent", "500s").exit_code == 0  # it leads again, as it can
        assert gates(server, "train") == [GATE]


@contextmanager
def _serving(server: ApiServer, tmp_path: Path, advice: FakeAdvisor) -> Iterator[None]:
    place = tmp_path / "service"
    place.mkdir()
    with serving(place, advice, api=server.kubeconfig(place / "kubeconfig")):
        yield


def test_without_a_time_all_are_let_go_at_once(server: ApiServer, tmp_path: Path) -> None:
    hold_lease(server)
    wait(server, "train")
    assert command(server, tmp_path).output == "1 gate was opened\n"
    assert not any(request.endswith("/leases/cachefs-scheduler") for request in server.requests)


def test_an_api_server_that_is_busy_is_asked_again(server: ApiServer, tmp_path: Path) -> None:
    wait(server, "one", "two")
    server.broken = 3
    assert command(server, tmp_path).output == "2 gates were opened\n"


def test_what_may_not_be_done_is_said_in_a_line(
    server: ApiServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wait(server, "one")
    file = server.kubeconfig(tmp_path / "kubeconfig")
    server.rules = [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]}]
    done = CliRunner().invoke(main, ["open-gates", "--api", str(file)])
    assert done.exit_code == 1
    assert 'cannot patch resource "pods"' in caplog.messages[-1]
    assert "\n" not in caplog.messages[-1]


def test_where_a_replica_comes_back_the_rest_is_its_own(server: ApiServer, tmp_path: Path) -> None:
    hold_lease(server)
    wait(server, "train")

    async def opened() -> GateOpening:
        api = await connect(str(server.kubeconfig(tmp_path / "kubeconfig")), "")
        try:
            silence = LeaseWatch(api, "cachefs-scheduler")
            assert await silence.is_silent_for(0.3)
            await asyncio.to_thread(renew, server)
            return await open_gates.open_gates(api, silence)
        finally:
            await api.close()

    assert asyncio.run(opened()) == GateOpening(0, is_alive=True)
    assert gates(server, "train") == [GATE]


class _Leases:
    """Says one thing after the other, and the last one for ever."""

    def __init__(self, *said: str) -> None:
        self.said = list(said)

    async def read_lease(self, _name: str) -> Lease:
        now = self.said.pop(0) if len(self.said) > 1 else self.said[0]
        if now == "away":
            raise KubeApiUnavailable("the API server does not answer")
        return Lease({}, LeaseSpec(holder="" if now == "given up" else "one", renewed=now))


@pytest.mark.parametrize(
    ("said", "is_silent"),
    [
        ("a a a", True),
        ("a a b", False),
        # While nothing is seen, silence does not count: a replica may have renewed it meanwhile.
        ("a " + "away " * 20 + "b b c", False),
        ("a given-up", True),
    ],
)
def test_silence_is_what_was_seen_all_the_time(said: str, is_silent: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_gates, "CHECK_SECONDS", 0.02)
    leases = _Leases(*(word.replace("-", " ") for word in said.split()))
    assert asyncio.run(LeaseWatch(leases, "one").is_silent_for(0.2)) is is_silent  # type: ignore[arg-type]


def test_an_api_server_that_never_answers_is_no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_gates, "CHECK_SECONDS", 0.02)
    monkeypatch.setattr(open_gates, "_UNREACHABLE_SECONDS", 0.2)
    with pytest.raises(KubeApiUnavailable):
        asyncio.run(LeaseWatch(_Leases("away"), "one").is_silent_for(0.1))  # type: ignore[arg-type]


def test_the_manifest_and_the_service_speak_of_one_lease() -> None:
    cron = manifest(ACCESS, "CronJob")["spec"]
    [container] = cron["jobTemplate"]["spec"]["template"]["spec"]["containers"]
    assert container["args"][0] == "open-gates"
    parsed = main.commands["open-gates"].make_context("open-gates", list(container["args"][1:]))  # type: ignore[attr-defined]
    assert parsed.params["if_silent"] == 300
    assert parsed.params["api"] == "pod"
    assert [rule["resourceNames"] for rule in manifest(ACCESS, "Role")["rules"]] == [[parsed.params["lease"]]]
    assert cron["jobTemplate"]["spec"]["activeDeadlineSeconds"] > parsed.params["if_silent"]
    assert scheduler_config.load(DEPLOY / "base" / "cachefs-scheduler.toml").kube.lease == parsed.params["lease"]  # type: ignore[union-attr]
