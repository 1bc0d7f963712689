"""The service beside an API server: pods come through its webhook, wait at its gate, and are let in."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from cachefs.errors import ConfigError
from cachefs_scheduler.kube import leader, pod_controller, pod_jobs
from tests.advising import FakeAdvisor
from tests.scheduler.kube.manifests import DEPLOY, manifest
from tests.scheduler.kube.pods import asked, pod
from tests.scheduler.kube.serving import Served, serving
from tests.servers.api_server import ApiServer, problems, running
from tests.waiting import until

ACCESS = DEPLOY / "base" / "scheduler-access.yaml"
GATE = {"name": "cachefs.io/copy-slot"}
HELD = {"gpu-1": 1.0, "gpu-2": 1.0, "gpu-3": 0.5}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiServer]:
    for module, name, seconds in (
        (leader, "RENEW_SECONDS", 0.2), (pod_controller, "FIRST_PAUSE", 0.05), (pod_controller, "MAX_PAUSE", 0.2),
        (pod_controller, "PASS_SECONDS", 0.2), (pod_jobs, "_SCAN_SECONDS", 0.1), (pod_jobs, "_RETRY_SECONDS", 0.2),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, seconds)
    with running() as found:
        # The service may do no more than the manifests let it.
        found.rules = [rule for kind in ("ClusterRole", "Role") for rule in manifest(ACCESS, kind)["rules"]]
        yield found


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as found:
        yield found


def serve(stack: ExitStack, server: ApiServer, tmp_path: Path, advice: FakeAdvisor, **settings: Any) -> Served:
    """The service, also as the webhook of the API server."""
    place = tmp_path / f"replica-{len(list(tmp_path.iterdir()))}"
    place.mkdir()
    served = stack.enter_context(serving(place, advice, api=server.kubeconfig(place / "kubeconfig"), **settings))
    server.webhook = lambda review: dict(served.answer("mutate", json.dumps(review).encode()))
    return served


def gates(server: ApiServer, name: str) -> list[dict[str, str]]:
    return list(server.pod(name)["spec"].get("schedulingGates") or [])


def test_a_suspended_pod_waits_says_why_and_starts_when_a_slot_is_free(
    server: ApiServer, stack: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pod_jobs, "ENDED_SECONDS", 0.3)
    advice = FakeAdvisor(HELD)
    advice.go = set()
    serve(stack, server, tmp_path, advice)
    job = "kube:training/pod/train"
    server.make_pod(pod("train", dataset="imagenet", policy="suspend"))
    assert gates(server, "train") == [GATE]
    until(lambda: server.events("CachefsWaiting"))
    event = server.events("CachefsWaiting")[0]
    assert event["message"] == "waits for a copy of imagenet: both slots of its copy are taken (place 1 in the queue)"
    assert event["involvedObject"]["uid"] == server.pod("train")["metadata"]["uid"]
    assert gates(server, "train") == [GATE]
    advice.let(job)
    until(lambda: gates(server, "train") == [])
    until(lambda: server.events("CachefsAdmitted"))
    server.bind("train", "gpu-1")
    until(lambda: ("placed", job, ("gpu-1",)) in advice.told)
    server.finish("train")
    until(lambda: advice.told[-1] == ("ended", job))
    # Nothing was said twice.
    assert len(server.events("CachefsWaiting")) == 1
    assert [told for told in advice.told if told[0] != "admit"] == [("placed", job, ("gpu-1",)), ("ended", job)]


def test_a_job_of_four_pods_is_let_in_as_one_and_spread(server: ApiServer, stack: ExitStack, tmp_path: Path) -> None:
    advice = FakeAdvisor({f"gpu-{number}": 1.0 if number < 4 else 0.2 for number in range(8)})
    advice.go = set()
    served = serve(stack, server, tmp_path, advice)
    made = [
        server.make_pod(pod(f"train-{rank}", "train", rank, dataset="imagenet", policy="suspend", ranks="4"))
        for rank in range(4)
    ]
    until(lambda: len(server.events("CachefsWaiting")) == 4)
    advice.let("kube:training/job/train")
    until(lambda: not any(gates(server, f"train-{rank}") for rank in range(4)))
    assert {ask.ranks for ask in advice.asked} <= {4}
    nodes = sorted(advice.held)
    taken = []
    for rank, each in enumerate(made):
        scores = served.scores(json.dumps(asked(each, nodes)).encode())
        best = [node for node, score in scores.items() if score == 10]
        assert len(best) == 1
        taken += best
        server.bind(f"train-{rank}", best[0])
    assert sorted(taken) == ["gpu-0", "gpu-1", "gpu-2", "gpu-3"]
    until(lambda: advice.told[-1] in [("resized", "kube:training/job/train", tuple(taken)),
                                      ("placed", "kube:training/job/train", tuple(taken))])  # fmt: skip


def test_a_job_that_grows_and_shrinks_takes_its_cache_along(
    server: ApiServer, stack: ExitStack, tmp_path: Path
) -> None:
    advice = FakeAdvisor(HELD)
    serve(stack, server, tmp_path, advice)
    job = "kube:training/job/elastic"
    for rank in range(2):
        server.make_pod(pod(f"elastic-{rank}", "elastic", rank, dataset="imagenet"))
    server.bind("elastic-0", "gpu-1")
    until(lambda: ("placed", job, ("gpu-1",)) in advice.told)
    server.bind("elastic-1", "gpu-2")
    until(lambda: ("resized", job, ("gpu-1", "gpu-2")) in advice.told)
    server.remove("pods", "elastic-0")
    until(lambda: advice.told[-1] == ("resized", job, ("gpu-2",)))


@pytest.mark.parametrize("trouble", ["compacted", "down", "broken", "token"])
def test_after_trouble_with_the_api_server_pods_are_let_in_as_before(
    server: ApiServer, stack: ExitStack, tmp_path: Path, trouble: str
) -> None:
    advice = FakeAdvisor(HELD)
    advice.go = set()
    serve(stack, server, tmp_path, advice)
    server.make_pod(pod("before", dataset="imagenet", policy="suspend"))
    until(lambda: server.events("CachefsWaiting"))
    if trouble == "compacted":
        server.compact()
    elif trouble == "down":
        server.down = True
    elif trouble == "broken":
        server.broken = 5
    else:
        server.token = "second"
    server.make_pod(pod("after", dataset="imagenet", policy="suspend"))
    advice.let("kube:training/pod/before", "kube:training/pod/after")
    seen = len(server.requests)
    until(lambda: len(server.requests) > seen + 3)
    server.down, server.token = False, "first"
    until(lambda: gates(server, "before") == gates(server, "after") == [])


def test_a_gate_that_somebody_opens_by_hand_is_no_error(server: ApiServer, stack: ExitStack, tmp_path: Path) -> None:
    """And other gates stay: they are not ours."""
    advice = FakeAdvisor(HELD)
    advice.go = set()
    serve(stack, server, tmp_path, advice)
    others = pod("others", dataset="imagenet", policy="suspend")
    others["spec"]["schedulingGates"] = [{"name": "example.com/quota"}]
    server.make_pod(others)
    server.make_pod(pod("by-hand", dataset="imagenet", policy="suspend"))
    until(lambda: len(server.events("CachefsWaiting")) == 2)
    server._do(server._change(("pods", "training", "by-hand"), lambda found: found["spec"].pop("schedulingGates")))
    advice.let("kube:training/pod/by-hand", "kube:training/pod/others")
    until(lambda: gates(server, "others") == [{"name": "example.com/quota"}])
    assert not any(request.startswith("PATCH") and "by-hand" in request for request in server.requests)


def test_a_pod_that_asks_for_nothing_any_more_is_let_in(server: ApiServer, stack: ExitStack, tmp_path: Path) -> None:
    advice = FakeAdvisor(HELD)
    advice.go = set()
    serve(stack, server, tmp_path, advice)
    for name in ("without", "wrong", "prefer"):
        server.make_pod(pod(name, dataset="imagenet", policy="suspend"))
    until(lambda: len(server.events("CachefsWaiting")) == 3)
    server.annotate("without", {})
    server.annotate("wrong", {"cachefs.io/dataset": "two words", "cachefs.io/policy": "suspend"})
    server.annotate("prefer", {"cachefs.io/dataset": "imagenet", "cachefs.io/policy": "prefer"})
    until(lambda: not any(gates(server, name) for name in ("without", "wrong", "prefer")))


def test_wrong_annotations_are_said_and_hold_up_nobody(server: ApiServer, stack: ExitStack, tmp_path: Path) -> None:
    serve(stack, server, tmp_path, FakeAdvisor(HELD))
    server.make_pod(pod("wrong", dataset="imagenet", policy="suspended", max_jobs_per_copy="-1"))
    assert gates(server, "wrong") == []
    until(lambda: len(server.events("CachefsAnnotation")) == 1)
    event = server.events("CachefsAnnotation")[0]
    assert event["type"] == "Warning"
    assert event["message"] == (
        "annotation cachefs.io/policy: expected one of prefer, require, suspend, clone, not 'suspended'; "
        "prefer is used; annotation cachefs.io/max-jobs-per-copy: expected a whole number from 1 to 1,000,000, "
        "not '-1'; it is ignored"
    )
    assert len(server.warnings) == 2  # kubectl prints them at once


def test_pods_without_the_annotation_are_left_alone(server: ApiServer, stack: ExitStack, tmp_path: Path) -> None:
    advice = FakeAdvisor(HELD)
    serve(stack, server, tmp_path, advice)
    server.make_pod(pod("plain"))
    server.make_pod(pod("train", dataset="imagenet"))
    server.bind("plain", "gpu-1")
    server.bind("train", "gpu-2")
    until(lambda: advice.told)
    assert advice.told == [("placed", "kube:training/pod/train", ("gpu-2",))]
    assert server.events() == []
    assert not any(request.startswith("PATCH") for request in server.requests)


def test_more_pods_than_a_page_of_a_list_has(server: ApiServer, stack: ExitStack, tmp_path: Path) -> None:
    advice = FakeAdvisor(HELD)
    for number in range(1100):
        annotations = {"dataset": "imagenet"} if number % 100 == 99 else {}
        server.make_pod(pod(f"pod-{number:04}", **annotations))
        if annotations:
            server.bind(f"pod-{number:04}", "gpu-1")
    served = serve(stack, server, tmp_path, advice)
    until(lambda: len(advice.told) == 11)
    assert {told[1] for told in advice.told} == {
        f"kube:training/pod/pod-{number:04}" for number in range(99, 1100, 100)
    }
    connection = served.connect()
    connection.request("GET", "/metrics")
    shown = connection.getresponse().read().decode()
    assert shown.startswith("the_rest 1\n")
    assert "\ncachefs_scheduler_pods 11\n" in shown
    connection.close()


def test_one_of_two_replicas_opens_gates_and_the_other_takes_over(
    server: ApiServer, stack: ExitStack, tmp_path: Path
) -> None:
    first, second = FakeAdvisor(HELD), FakeAdvisor(HELD)
    first.go = second.go = set()
    inner = stack.enter_context(ExitStack())
    one = serve(inner, server, tmp_path, first)
    until(lambda: one.part._controller is not None and one.part._controller.is_leader)
    two = serve(stack, server, tmp_path, second)
    server.make_pod(pod("train", dataset="imagenet", policy="suspend"))
    until(lambda: server.events("CachefsWaiting"))
    until(lambda: two.part._controller is not None and len(two.part._controller) == 1)
    assert second.told == []
    body = json.dumps(asked(server.pod("train"), ["gpu-1", "gpu-3"])).encode()
    assert one.scores(body) == two.scores(body) == {"gpu-1": 10, "gpu-3": 5}
    before = server.lease("cachefs-scheduler")["spec"]
    inner.close()
    second.let("kube:training/pod/train")
    until(lambda: gates(server, "train") == [])
    after = server.lease("cachefs-scheduler")["spec"]
    assert after["holderIdentity"] != before["holderIdentity"]
    assert after["leaseTransitions"] == before["leaseTransitions"] + 1


def test_a_replica_that_dies_loses_the_lease_in_time(
    server: ApiServer, stack: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has not given it up: the other one sees that nobody renews it."""
    monkeypatch.setattr(leader, "LEASE_SECONDS", 2.0)
    lease = {
        "metadata": {"name": "cachefs-scheduler"},
        "spec": {"holderIdentity": "dead", "leaseDurationSeconds": 2, "renewTime": "2099-01-01T00:00:00.000000Z"},
    }
    server._do(server._create("leases", "cachefs", lease))
    served = serve(stack, server, tmp_path, FakeAdvisor(HELD))
    until(lambda: served.part._controller is not None and served.part._controller.is_leader)
    assert server.lease("cachefs-scheduler")["spec"]["holderIdentity"] != "dead"


def test_all_that_was_asked_of_the_api_server_is_published(server: ApiServer, stack: ExitStack, tmp_path: Path) -> None:
    """The double refuses what is not: here it is shown that it would."""
    assert problems("core.v1.Event", {"metadata": {"name": "a"}, "involvedObject": {}, "what": 1}) != []
    advice = FakeAdvisor(HELD)
    serve(stack, server, tmp_path, advice)
    server.make_pod(pod("train", dataset="imagenet", policy="suspend"))
    until(lambda: server.events("CachefsAdmitted"))
    until(lambda: gates(server, "train") == [])
    kinds = {request.split()[0] + " " + request.split("/")[-1] for request in server.requests}
    assert {"GET pods", "PATCH train", "POST events", "POST leases"} <= kinds


def test_a_service_that_is_no_pod_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(ConfigError, match=r"^kube.api = 'pod': .+$"), serving(tmp_path, FakeAdvisor(), api="pod"):
        pass
    with (
        pytest.raises(ConfigError, match=r"^kube.api = '/none': .+$"),
        serving(tmp_path, FakeAdvisor(), api="/none"),
    ):
        pass
