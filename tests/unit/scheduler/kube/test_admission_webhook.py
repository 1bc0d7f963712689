"""What the webhook changes of pods, and that it changes nothing twice and nothing of others."""

import base64
import json
from typing import Any

import msgspec
import pytest

from cachefs_scheduler.kube.admission_webhook import MAX_TERMS, AdmissionWebhook
from cachefs_scheduler.kube.kube_messages import AdmissionReview
from tests.advising import FakeAdvisor
from tests.scheduler.kube.pods import pod
from tests.servers.api_server import patched, problems

HELD = {"gpu-1": 1.0, "gpu-2": 0.25, "gpu-3": 0.0, "gpu-4": 0.001}
GATE = {"name": "cachefs.io/copy-slot"}


def review(made: dict[str, Any], operation: str = "CREATE") -> AdmissionReview:
    body = {
        "apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview",
        "request": {"uid": "review-1", "namespace": "training", "operation": operation, "object": made},
    }  # fmt: skip
    return msgspec.json.decode(json.dumps(body), type=AdmissionReview)


def changed(made: dict[str, Any], *, affinity: bool = False, advice: FakeAdvisor | None = None) -> dict[str, Any]:
    """The pod as it comes out of the webhook."""
    answer = AdmissionWebhook(advice or FakeAdvisor(HELD)).review_pod(review(made), affinity=affinity)
    response = answer["response"]
    assert response["allowed"] is True
    assert response["uid"] == "review-1"
    found = patched(made, json.loads(base64.b64decode(response["patch"]))) if "patch" in response else made
    assert problems("core.v1.Pod", found) == []
    return found


def test_only_suspended_pods_get_a_gate() -> None:
    for policy in ("prefer", "require", "clone"):
        made = pod("train", dataset="imagenet", policy=policy)
        assert changed(made) == made
    found = changed(pod("train", dataset="imagenet", policy="suspend"))
    assert found["spec"]["schedulingGates"] == [GATE]
    assert changed(found) == found


def test_other_gates_stay() -> None:
    made = pod("train", dataset="imagenet", policy="suspend")
    made["spec"]["schedulingGates"] = [{"name": "example.com/other"}]
    assert changed(made)["spec"]["schedulingGates"] == [{"name": "example.com/other"}, GATE]


def test_pods_without_the_annotation_are_not_touched() -> None:
    made = pod("train", policy="suspend")
    assert changed(made, affinity=True) == made


def test_pods_that_are_not_new_are_not_touched() -> None:
    made = pod("train", dataset="imagenet", policy="suspend")
    answer = AdmissionWebhook(FakeAdvisor(HELD)).review_pod(review(made, "UPDATE"), affinity=True)
    assert set(answer["response"]) == {"uid", "allowed"}


def test_a_pod_that_has_its_node_already_gets_no_gate() -> None:
    """The API server would refuse it."""
    made = pod("train", dataset="imagenet", policy="suspend")
    made["spec"]["nodeName"] = "gpu-1"
    assert changed(made, affinity=True) == made


@pytest.mark.parametrize(
    "there",
    [
        None, {}, {"podAffinity": {}}, {"nodeAffinity": {}},
        {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}},
        {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [
            {"weight": 7, "preference": {"matchExpressions": [{"key": "a", "operator": "Exists"}]}}
        ]}},
        {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [
            {"matchExpressions": [{"key": "a", "operator": "Exists"}]}
        ]}}},
    ],
    ids=range(7),
)  # fmt: skip
def test_affinity_prefers_nodes_by_what_they_hold_and_keeps_the_users_own(there: dict[str, Any] | None) -> None:
    made = pod("train", dataset="imagenet")
    if there is not None:
        made["spec"]["affinity"] = there
    found = changed(made, affinity=True)
    terms = found["spec"]["affinity"]["nodeAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    own = (there or {}).get("nodeAffinity", {}).get("preferredDuringSchedulingIgnoredDuringExecution", [])
    assert terms[: len(own)] == own
    # `metadata.name` takes one value, and weights are from 1 to 100.
    assert [(term["weight"], term["preference"]["matchFields"][0]["values"]) for term in terms[len(own) :]] == [
        (100, ["gpu-1"]), (25, ["gpu-2"]), (1, ["gpu-4"]),
    ]  # fmt: skip
    for kind, value in (there or {}).get("nodeAffinity", {}).items():
        if kind.startswith("required"):
            assert found["spec"]["affinity"]["nodeAffinity"][kind] == value
    assert changed(found, affinity=True) == found


def test_affinity_names_the_best_nodes_of_many() -> None:
    advice = FakeAdvisor({f"gpu-{number}": number / 5000 for number in range(5000)})
    found = changed(pod("train", dataset="imagenet"), affinity=True, advice=advice)
    terms = found["spec"]["affinity"]["nodeAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    names = [term["preference"]["matchFields"][0]["values"][0] for term in terms]
    assert names == [f"gpu-{number}" for number in range(4999, 4999 - MAX_TERMS, -1)]


def test_affinity_names_no_node_that_kubernetes_cannot_have() -> None:
    """The API server would refuse the pod."""
    advice = FakeAdvisor(dict.fromkeys(["GPU_1", "gpu.", "-gpu", "x" * 254, "", "gpu-1.example.org"], 1.0))
    found = changed(pod("train", dataset="imagenet"), affinity=True, advice=advice)
    terms = found["spec"]["affinity"]["nodeAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    assert [term["preference"]["matchFields"][0]["values"] for term in terms] == [["gpu-1.example.org"]]


def test_with_nothing_known_there_is_no_affinity() -> None:
    made = pod("train", dataset="imagenet")
    assert changed(made, affinity=True, advice=FakeAdvisor()) == made


def test_an_error_inside_lets_the_pod_in_with_a_warning() -> None:
    advice = FakeAdvisor(HELD)
    advice.broken = RuntimeError("a bug")
    answer = AdmissionWebhook(advice).review_pod(review(pod("train", dataset="imagenet")), affinity=True)
    assert answer["response"]["allowed"] is True
    assert "patch" not in answer["response"]
    assert len(answer["response"]["warnings"]) == 1


def test_a_pod_whose_name_is_to_be_made_is_ranked_as_any_other() -> None:
    made = pod("", dataset="imagenet")
    made["metadata"] = {"generateName": "train-", "annotations": made["metadata"]["annotations"]}
    assert "affinity" in changed(made, affinity=True)["spec"]


def test_no_pod_gets_a_gate_that_nobody_opens() -> None:
    made = pod("train", dataset="imagenet", policy="suspend")
    response = AdmissionWebhook(FakeAdvisor(HELD), lambda: False).review_pod(review(made), affinity=False)["response"]
    assert response["allowed"] is True
    assert "patch" not in response
    assert "does not wait" in response["warnings"][0]
