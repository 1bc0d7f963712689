"""The extender answers all that real kube-schedulers have asked, over HTTPS."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.advising import FakeAdvisor
from tests.scheduler.kube.bodies import Recorded, annotated, recorded
from tests.scheduler.kube.serving import Served, serving

HELD = {"node-a": 0.0, "node-b": 1.0, "node-c": 0.4}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("replay"), FakeAdvisor(HELD)) as service:
        yield service


def kept(result: dict[str, object]) -> list[str]:
    """Names of the nodes that kube-scheduler would go on with."""
    if isinstance(result["NodeNames"], list):
        return list(result["NodeNames"])
    assert isinstance(result["Nodes"], dict)
    return [node["metadata"]["name"] for node in result["Nodes"]["items"]]


def test_all_four_folders_are_replayed() -> None:
    folders = {each.name.split("/")[0] for each in recorded()}
    assert len(folders) == 4
    assert len(recorded()) == 132
    assert {each.verb for each in recorded()} == {"filter", "prioritize"}


def test_every_recorded_request_gets_a_well_formed_answer(served: Served) -> None:
    """As they were sent: pods without the annotation of cachefs, so nothing is filtered and nothing preferred. All go
    over one connection, with the headers that Go sent."""
    connection = served.connect()
    for each in recorded():
        headers = {name: each.headers[name] for name in ("Content-Type", "Accept-Encoding", "User-Agent")}
        connection.request("POST", f"/{each.verb}", each.body, headers)
        answer = connection.getresponse()
        found = json.loads(answer.read())
        assert answer.status == 200, each.name
        if each.verb == "prioritize":
            assert found == [{"Host": node, "Score": 0} for node in each.nodes], each.name
        else:
            assert kept(found) == each.nodes, each.name
            assert (found["FailedNodes"], found["Error"]) == ({}, ""), each.name
    connection.close()


def test_whole_nodes_come_back_as_they_were_sent(served: Served) -> None:
    each = next(one for one in recorded() if "false" in one.name and one.verb == "filter")
    found = served.answer("filter", each.body)
    assert found["NodeNames"] is None
    assert found["Nodes"]["items"] == json.loads(each.body)["Nodes"]["items"]


@pytest.mark.parametrize("one", [each for each in recorded() if "imagenet-1" in each.name], ids=lambda one: one.name)
def test_pods_with_the_annotation_get_scores_and_refusals(served: Served, one: Recorded) -> None:
    body = annotated(one.body, dataset="imagenet@latest", policy="require")
    if one.verb == "prioritize":
        assert served.scores(body) == {"node-a": 0, "node-b": 10, "node-c": 4}
        return
    found = served.answer("filter", body)
    assert kept(found) == ["node-b", "node-c"]
    # kube-scheduler shows the text, and evicts nobody from such a node since that would not help.
    assert (
        found["FailedNodes"]
        == found["FailedAndUnresolvableNodes"]
        == {"node-a": "cachefs: holds nothing of imagenet@latest"}
    )


@pytest.mark.parametrize("policy", ["prefer", "suspend", "clone", "no such policy", ""])
def test_only_the_policy_require_filters(served: Served, policy: str) -> None:
    one = next(each for each in recorded() if each.verb == "filter")
    found = served.answer("filter", annotated(one.body, dataset="imagenet", policy=policy))
    assert kept(found) == one.nodes
    assert found["FailedNodes"] == {}


def test_a_pod_that_uses_all_that_pods_may_have_is_read(served: Served) -> None:
    """Those that were recorded are plain ones."""
    one = next(each for each in recorded() if each.verb == "prioritize")
    args = json.loads(annotated(one.body, dataset="imagenet"))
    args["Pod"]["spec"] |= {
        "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": []}}},
        "schedulingGates": [], "topologySpreadConstraints": [{"maxSkew": 1}], "priority": -5, "nodeName": "",
        "resourceClaims": [{"name": "gpu"}],
    }  # fmt: skip
    args["Pod"]["metadata"] |= {
        "ownerReferences": [{"kind": "Job", "name": "j", "uid": "u", "controller": True}], "labels": None,
        "deletionTimestamp": None, "managedFields": [{"manager": "kubectl", "fieldsV1": {"f:metadata": {}}}],
    }  # fmt: skip
    args["Pod"]["status"] = {"phase": "Pending", "conditions": [{"type": "PodScheduled", "status": "False"}]}
    assert served.scores(json.dumps(args).encode()) == {"node-a": 0, "node-b": 10, "node-c": 4}


def test_an_error_inside_filters_and_prefers_nothing(tmp_path: Path) -> None:
    advice = FakeAdvisor(HELD)
    advice.broken = RuntimeError("a bug")
    one = next(each for each in recorded() if each.verb == "filter")
    body = annotated(one.body, dataset="imagenet", policy="require")
    with serving(tmp_path, advice) as service:
        assert kept(service.answer("filter", body)) == one.nodes
        assert service.scores(body) == dict.fromkeys(one.nodes, 0)


def test_with_nothing_known_every_node_counts_the_same(tmp_path: Path) -> None:
    one = next(each for each in recorded() if each.verb == "prioritize")
    with serving(tmp_path, FakeAdvisor()) as service:
        assert service.scores(annotated(one.body, dataset="imagenet")) == dict.fromkeys(one.nodes, 0)


def test_scores_that_are_out_of_range_are_not_passed_on(tmp_path: Path) -> None:
    """kube-scheduler takes 1000 as 1000."""
    one = next(each for each in recorded() if each.verb == "prioritize")
    advice = FakeAdvisor({"node-a": 7.0, "node-b": -3.0, "node-c": float("nan")})
    with serving(tmp_path, advice) as service:
        assert service.scores(annotated(one.body, dataset="imagenet")) == {"node-a": 10, "node-b": 0, "node-c": 0}
