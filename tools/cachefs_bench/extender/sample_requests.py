"""Requests of kube-scheduler with made-up nodes, encoded as Go does."""

import json
from typing import Any

DATASET = "imagenet"
# A kubelet lists up to 50 images in a node's status; they are most of a large node's bytes.
_IMAGE = {
    "names": ["registry.example.org/team/training@sha256:" + "0" * 64, "registry.example.org/team/training:1.2.3"]
}


def node_name(number: int) -> str:
    """Return a node's name, in the style of clouds."""
    return f"gke-training-gpu-pool-{number:05}.europe-west4.internal"


def _pod(number: int, ranks: int, policy: str) -> dict[str, Any]:
    annotations = {"cachefs.io/dataset": f"{DATASET}@latest", "cachefs.io/policy": policy}
    labels: dict[str, str] = {}
    owners: list[dict[str, Any]] = []
    if ranks > 1:
        job = f"train-{number // ranks}"
        annotations["cachefs.io/ranks"] = str(ranks)
        index = str(number % ranks)
        labels = {"batch.kubernetes.io/job-name": job, "batch.kubernetes.io/job-completion-index": index}
        owners = [{"apiVersion": "batch/v1", "kind": "Job", "name": job, "uid": job, "controller": True}]
    return {
        "metadata": {
            "name": f"pod-{number}", "namespace": "training", "uid": f"uid-{number}", "labels": labels,
            "annotations": annotations, "ownerReferences": owners,
        },
        "spec": {"containers": [{"name": "train", "image": "train:1"}], "schedulerName": "default-scheduler"},
        "status": {"phase": "Pending"},
    }  # fmt: skip


def names_request(number: int, nodes: int, ranks: int = 1, policy: str = "prefer") -> bytes:
    """Return a request with names only (`nodeCacheCapable: true`). number: of the pod."""
    names = [node_name(each) for each in range(nodes)]
    return _encoded({"Pod": _pod(number, ranks, policy), "Nodes": None, "NodeNames": names})


def whole_nodes_request(number: int, nodes: int, images: int, policy: str = "prefer") -> bytes:
    """Return a request with whole nodes (`nodeCacheCapable: false`) of about 1,200 bytes, plus 170 per image."""
    items = [_node(each, images) for each in range(nodes)]
    return _encoded({"Pod": _pod(number, 1, policy), "Nodes": {"metadata": {}, "items": items}, "NodeNames": None})


def _node(number: int, images: int) -> dict[str, Any]:
    name = node_name(number)
    quantities = {"cpu": "96", "memory": "1056Gi", "nvidia.com/gpu": "8", "pods": "110", "ephemeral-storage": "2Ti"}
    return {
        "metadata": {
            "name": name, "uid": f"{number:032}", "resourceVersion": str(number),
            "labels": {"kubernetes.io/hostname": name, "topology.kubernetes.io/zone": f"z{number % 3}"},
            "annotations": {"node.alpha.kubernetes.io/ttl": "0"},
        },
        "spec": {"podCIDR": "10.0.0.0/24", "providerID": f"cloud:///{name}"},
        "status": {
            "capacity": quantities, "allocatable": quantities,
            "conditions": [
                {"type": kind, "status": "True" if kind == "Ready" else "False", "reason": kind}
                for kind in ("MemoryPressure", "DiskPressure", "PIDPressure", "Ready")
            ],
            "addresses": [{"type": "InternalIP", "address": "10.0.0.1"}, {"type": "Hostname", "address": name}],
            "nodeInfo": {"kubeletVersion": "v1.36.2", "osImage": "Debian", "architecture": "amd64"},
            "images": [_IMAGE | {"sizeBytes": each} for each in range(images)],
        },
    }  # fmt: skip


def _encoded(args: dict[str, Any]) -> bytes:
    return json.dumps(args, separators=(",", ":")).encode()
