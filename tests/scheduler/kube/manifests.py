"""The manifests of scheduler_plugin/deploy, as kustomize would build them from what they use of it."""

from functools import cache
from pathlib import Path
from typing import Any

import yaml

from tests.servers.api_server import patched

DEPLOY = Path(__file__).parents[3] / "scheduler_plugin" / "deploy"

Document = dict[str, Any]


@cache
def _text(path: Path) -> list[Document]:
    return [found for found in yaml.safe_load_all(path.read_text()) if found]


def documents(path: Path) -> list[Document]:
    """Of a file."""
    return [dict(found) for found in _text(path)]


def manifest(path: Path, kind: str) -> Document:
    """The only one of a kind in a file."""
    (found,) = [each for each in documents(path) if each["kind"] == kind]
    return found


def kustomization(directory: Path) -> Document:
    (found,) = documents(directory / "kustomization.yaml")
    return found


def build(directory: Path) -> list[Document]:
    """All documents, with generated ConfigMaps and Secrets as documents that have names and keys."""
    spec = kustomization(directory)
    found: list[Document] = []
    for place in spec.get("resources", []):
        path = (directory / place).resolve()
        found += build(path) if path.is_dir() else documents(path)
    for place in spec.get("components", []):
        found = _with_component(found, (directory / place).resolve())
    for kind, generators in (("ConfigMap", "configMapGenerator"), ("Secret", "secretGenerator")):
        for each in spec.get(generators, []):
            data = {name.partition("=")[0]: "" for name in each["files"]}
            metadata = {"name": each["name"], "namespace": each.get("namespace", spec.get("namespace", ""))}
            found.append({"apiVersion": "v1", "kind": kind, "metadata": metadata, "data": data})
    found = [_patched(each, spec.get("patches", []), directory) for each in found]
    if "namespace" in spec:
        for each in found:
            if each["kind"] not in ("Namespace", "ClusterRole", "ClusterRoleBinding"):
                each["metadata"] = each["metadata"] | {"namespace": spec["namespace"]}
    return found


def _with_component(found: list[Document], directory: Path) -> list[Document]:
    spec = kustomization(directory)
    for place in spec.get("resources", []):
        found = found + documents(directory / place)
    return [_patched(each, spec.get("patches", []), directory) for each in found]


def _patched(found: Document, patches: list[Document], directory: Path) -> Document:
    for each in patches:
        target = each["target"]
        if (target["kind"], target["name"]) != (found["kind"], found["metadata"]["name"]):
            continue
        # What make-certificates.sh writes is not there.
        if "patch" in each:
            found = patched(found, yaml.safe_load(each["patch"]))
        elif (directory / each["path"]).exists():
            found = patched(found, documents(directory / each["path"]))
    return found
