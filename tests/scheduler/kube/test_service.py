"""The whole service as a process, beside real daemons and the API server of tests: which node it prefers, who waits for
whom, and what happens when it is killed."""

import json
import ssl
import threading
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from http.client import HTTPException, HTTPSConnection
from typing import Any

import pytest

from cachefs.observe_messages import CommandKind, NodeCommand
from cachefs.scheduling_messages import QUEUE_PATH, QueueEntry, QueueStatus
from cachefs_bench.lab.ports import free_ports
from tests.certificates import Authority
from tests.scheduler.kube.bodies import annotated, recorded
from tests.scheduler.kube.pods import asked, pod
from tests.scheduler.observed import Observed, made_files, observed
from tests.scheduler.running import Scheduler, scheduler
from tests.servers.api_server import ApiServer, running

SECONDS = 60.0
# As the recorded requests call them.
NAMES = {"node-b": "n0", "node-c": "n1"}


@dataclass
class Place:
    """Two daemons, of which the first one holds the dataset, and the service."""

    nodes: list[Observed]
    scheduler: Scheduler
    server: ApiServer
    port: int
    context: ssl.SSLContext

    def ask(self, verb: str, body: bytes) -> Any:
        """What it answers. Raises OSError where nobody does."""
        connection = HTTPSConnection("127.0.0.1", self.port, timeout=SECONDS, context=self.context)
        try:
            connection.request("POST", f"/{verb}", body)
            answer = connection.getresponse()
            assert answer.status == 200
            return json.loads(answer.read())
        finally:
            connection.close()

    def scores(self, body: bytes) -> dict[str, int]:
        return {entry["Host"]: entry["Score"] for entry in self.ask("prioritize", body)}

    def placed(self) -> list[QueueEntry]:
        """Jobs that the service knows to run."""
        jobs = self.scheduler.client.get(QUEUE_PATH, QueueStatus).jobs
        return [job for job in jobs if job.state == "placed"]

    def gates(self, name: str) -> list[Any]:
        return list(self.server.pod(name)["spec"].get("schedulingGates") or [])


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    work = tmp_path_factory.mktemp("k")
    made_files(work / "set", 200)
    files = Authority(work / "authority").issue("localhost")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(cafile=files.ca)
    port = free_ports(1)[0]
    with ExitStack() as stack:
        nodes = [stack.enter_context(observed(work / name, name)) for name in NAMES.values()]
        for node in nodes:
            node.daemon.add_dataset("set", f"file://{work}/set")
        server = stack.enter_context(running())
        sections: dict[str, dict[str, Any]] = {
            "names": NAMES,
            "kube": {
                "listen": f"127.0.0.1:{port}", "tls_cert": str(files.cert), "tls_key": str(files.key),
                "api": str(server.kubeconfig(work / "kubeconfig")),
            },
        }  # fmt: skip
        service = stack.enter_context(scheduler(work / "s", [node.address for node in nodes], sections))
        service.until(lambda: (status := service.status()) is not None and status.fresh == 2)
        nodes[0].order(NodeCommand(kind=CommandKind.WARM, id=uuid.uuid4().hex, dataset="set"))
        service.until(lambda: service.held("node-b") == 1.0)
        found = Place(nodes, service, server, port, context)
        server.webhook = lambda review: dict(found.ask("mutate", json.dumps(review).encode()))
        yield found


def test_the_node_that_holds_the_data_is_the_best_one(place: Place) -> None:
    for one in [each for each in recorded() if "imagenet-1" in each.name]:
        body = annotated(one.body, dataset="set@latest", policy="require")
        if one.verb == "prioritize":
            scores = place.scores(body)
            assert sorted(scores) == ["node-a", "node-b", "node-c"]
            assert scores["node-b"] == 10
            assert max(scores["node-a"], scores["node-c"]) < 10, place.scheduler.log.read_text()[-2000:]
        else:
            assert set(place.ask("filter", body)["FailedNodes"]) == {"node-a", "node-c"}


def test_a_second_job_waits_for_the_copy_of_the_first(place: Place) -> None:
    """And a service that is killed in between goes on where it was, from what the API server lists."""
    server, service = place.server, place.scheduler
    ask = {"dataset": "set", "policy": "suspend", "max_jobs_per_copy": "1"}
    server.make_pod(pod("first", **ask))
    assert place.gates("first")
    service.until(lambda: not place.gates("first"))
    server.bind("first", "node-b")
    service.until(lambda: "kube:training/pod/first" in [job.job for job in place.placed()])
    server.make_pod(pod("second", **ask))
    service.until(lambda: any(event["involvedObject"]["name"] == "second" for event in server.events("CachefsWaiting")))
    service.kill()
    # Nobody answers now: a pod that is made meanwhile gets no gate, and is scheduled as ever.
    server.make_pod(pod("meanwhile", **ask))
    assert place.gates("meanwhile") == []
    server.remove("pods", "meanwhile")
    service.start()
    service.until(lambda: (status := service.status()) is not None and status.fresh == 2)
    seen = len(server.requests)
    service.until(lambda: len(server.requests) > seen + 4)
    assert place.gates("second")
    server.finish("first")
    service.until(lambda: not place.gates("second"))
    server.bind("second", "node-b")
    server.finish("second")


def test_who_asks_while_the_service_is_killed_is_not_kept_waiting(place: Place) -> None:
    """kube-scheduler with `ignorable: true`: each question is answered right, or fails at once."""
    body = json.dumps(asked(pod("train", dataset="set"), list(NAMES))).encode()
    answered, failed = [], []
    ended = threading.Event()

    def ask() -> None:
        while not ended.is_set():
            try:
                answered.append(place.scores(body)["node-b"])
            except (OSError, HTTPException):
                failed.append(1)
                ended.wait(0.01)

    asking = [threading.Thread(target=ask) for _ in range(4)]
    for thread in asking:
        thread.start()
    place.scheduler.until(lambda: len(answered) > 20)
    place.scheduler.kill()
    place.scheduler.process = None
    place.scheduler.until(lambda: len(failed) > 20)
    before = len(answered)
    place.scheduler.start()
    place.scheduler.until(lambda: len(answered) > before + 20 and answered[-1] == 10)
    ended.set()
    for thread in asking:
        thread.join(SECONDS)
        assert not thread.is_alive()
