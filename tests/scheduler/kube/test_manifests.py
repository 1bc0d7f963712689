"""The manifests are what the API server's published schemas allow, and what refers to each other really matches."""

import asyncio
import configparser
import os
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from cachefs.pem_files import PemFiles
from cachefs_cluster import config as daemon_config
from cachefs_scheduler import config as scheduler_config
from cachefs_scheduler.certificates import ServerCertificates
from cachefs_scheduler.kube.admission_webhook import AdmissionWebhook
from cachefs_scheduler.kube.extender import Extender
from cachefs_scheduler.kube.gangs import PodGangs
from cachefs_scheduler.kube.kube_messages import ObjectMetadata, OwnerReference, Pod
from cachefs_scheduler.kube.pod_job import DATASET, parse_pod_job
from cachefs_scheduler.kube.server import KubeServer, StatusSources
from tests.advising import FakeAdvisor
from tests.scheduler.kube.manifests import DEPLOY, Document, build, documents, kustomization, manifest
from tests.servers.api_server import problems

ROOT = Path(__file__).parents[3]
# What is built and applied as a whole.
WHOLE = ("cert-manager", "by-hand")
# Kinds that are no part of Kubernetes itself.
OTHERS = {
    "cert-manager.io/v1": {"Issuer", "Certificate"},
    "monitoring.coreos.com/v1": {"ServiceMonitor"},
    "kubescheduler.config.k8s.io/v1": {"KubeSchedulerConfiguration"},
    "kustomize.config.k8s.io/v1beta1": {"Kustomization"},
    "kustomize.config.k8s.io/v1alpha1": {"Component"},
}
GROUPS = {
    "v1": "core.v1", "apps/v1": "apps.v1", "batch/v1": "batch.v1", "rbac.authorization.k8s.io/v1": "rbac.v1",
    "policy/v1": "policy.v1", "networking.k8s.io/v1": "networking.v1", "autoscaling/v2": "autoscaling.v2",
    "admissionregistration.k8s.io/v1": "admissionregistration.v1",
}  # fmt: skip
# Of the image's Debian packages, and of kube-scheduler's image.
PROGRAMS = {"sh", "install", "umount", "mkdir", "mountpoint", "kube-scheduler"}


def files() -> list[Path]:
    return sorted(path for path in DEPLOY.rglob("*.yaml") if path.name != "adapter-rules.yaml")


def every() -> Iterator[Document]:
    """All that is applied, as it is built."""
    for name in (*WHOLE, "second-scheduler", "elastic"):
        yield from build(DEPLOY / name)
    yield from documents(DEPLOY / "example" / "job.yaml")


def workloads(found: list[Document]) -> Iterator[tuple[str, Document]]:
    """Name and pod template of each."""
    for each in found:
        if each["kind"] == "CronJob":
            yield f"CronJob {each['metadata']['name']}", each["spec"]["jobTemplate"]["spec"]["template"]
        if "template" in (spec := each.get("spec", {})) and each["kind"] in (
            "DaemonSet",
            "Deployment",
            "StatefulSet",
            "Job",
        ):
            yield f"{each['kind']} {each['metadata']['name']}", spec["template"]


def selects(selector: Document, labels: Document) -> bool:
    return bool(selector) and all(labels.get(name) == value for name, value in selector.items())


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(DEPLOY)))
def test_every_document_is_what_the_published_schema_allows(path: Path) -> None:
    found = documents(path)
    assert found
    for each in found:
        if each["apiVersion"] in OTHERS:
            assert each["kind"] in OTHERS[each["apiVersion"]]
            continue
        assert problems(f"{GROUPS[each['apiVersion']]}.{each['kind']}", each) == []


def test_the_schemas_refuse_what_is_wrong() -> None:
    """Else the test above would say nothing."""
    (job,) = documents(DEPLOY / "example" / "job.yaml")
    assert problems("batch.v1.Job", job | {"spec": job["spec"] | {"completionmode": "Indexed"}}) != []
    assert problems("batch.v1.Job", job | {"spec": job["spec"] | {"completions": "four"}}) != []


def test_every_file_is_used_by_some_kustomization_and_every_one_named_is_there() -> None:
    named = set()
    for path in DEPLOY.rglob("kustomization.yaml"):
        spec = kustomization(path.parent)
        places = [*spec.get("resources", []), *spec.get("components", [])]
        for generator in spec.get("configMapGenerator", []):
            places += generator["files"]
        for place in places:
            target = (path.parent / place).resolve()
            assert target.exists(), f"{path}: {place}"
            named.add(target)
    alone = {"kube-scheduler/configuration.yaml", "elastic/adapter-rules.yaml", "example/job.yaml"}
    left = {
        str(path.relative_to(DEPLOY))
        for path in (*DEPLOY.rglob("*.yaml"), *DEPLOY.rglob("*.toml"))
        if path not in named and path.name not in ("kustomization.yaml", "ca-bundle.yaml")
    }
    assert left == alone


@pytest.mark.parametrize("name", [*WHOLE, "second-scheduler", "elastic"])
def test_what_is_referred_to_is_there(name: str) -> None:
    found = build(DEPLOY / name)
    # The others come on top of the whole.
    known = found if name in WHOLE else found + build(DEPLOY / "cert-manager")

    def there(kind: str, one: str) -> bool:
        return any(each["kind"] == kind and each["metadata"]["name"] == one for each in known)

    secrets = {each["spec"]["secretName"] for each in known if each["kind"] == "Certificate"}
    secrets |= {each["metadata"]["name"] for each in known if each["kind"] == "Secret"}
    for each in found:
        assert each["metadata"].get("namespace", "cachefs") == "cachefs"
        if each["kind"] in ("RoleBinding", "ClusterRoleBinding"):
            role = each["roleRef"]
            assert there(role["kind"], role["name"]) or role["name"].startswith("system:")
            assert all(there(subject["kind"], subject["name"]) for subject in each["subjects"])
    for owner, template in workloads(found):
        spec = template["spec"]
        assert there("ServiceAccount", spec["serviceAccountName"]), owner
        volumes = {volume["name"]: volume for volume in spec.get("volumes", [])}
        mounted = set()
        for container in spec["containers"] + spec.get("initContainers", []):
            mounts = [mount["name"] for mount in container.get("volumeMounts", [])]
            assert set(mounts) <= set(volumes), owner
            assert len({mount["mountPath"] for mount in container.get("volumeMounts", [])}) == len(mounts), owner
            mounted |= set(mounts)
        assert mounted == set(volumes), f"{owner} has volumes that nobody mounts"
        for volume in volumes.values():
            if "configMap" in volume:
                assert there("ConfigMap", volume["configMap"]["name"]), owner
            if "secret" in volume:
                assert volume["secret"]["secretName"] in secrets, owner


@pytest.mark.parametrize("name", [*WHOLE, "second-scheduler", "elastic"])
def test_selectors_and_ports_match(name: str) -> None:
    found = build(DEPLOY / name)
    templates = dict(workloads(found))
    for each in found:
        spec, labels = each.get("spec", {}), [template["metadata"]["labels"] for template in templates.values()]
        if each["kind"] in ("DaemonSet", "Deployment", "StatefulSet"):
            assert selects(spec["selector"]["matchLabels"], spec["template"]["metadata"]["labels"])
        elif each["kind"] == "Service":
            chosen = [each for each in templates.values() if selects(spec["selector"], each["metadata"]["labels"])]
            assert chosen, each["metadata"]["name"]
            for template in chosen:
                ports = {port["name"] for one in template["spec"]["containers"] for port in one.get("ports", [])}
                assert {port["targetPort"] for port in spec["ports"]} <= ports
        elif each["kind"] == "PodDisruptionBudget":
            assert any(selects(spec["selector"]["matchLabels"], one) for one in labels)
        elif each["kind"] == "NetworkPolicy":
            for peer in [
                {"podSelector": spec["podSelector"]},
                *(peer for rule in spec["ingress"] for peer in rule["from"]),
            ]:
                assert any(selects(peer["podSelector"]["matchLabels"], one) for one in labels)
        elif each["kind"] == "HorizontalPodAutoscaler":
            target = spec["scaleTargetRef"]
            assert f"{target['kind']} {target['name']}" in templates
    for owner, template in templates.items():
        for container in template["spec"]["containers"]:
            ports = {port["name"] for port in container.get("ports", [])}
            for probe in ("readinessProbe", "livenessProbe"):
                if "httpGet" in container.get(probe, {}):
                    assert container[probe]["httpGet"]["port"] in ports, owner


def test_what_containers_run_is_in_the_image() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    ours = {line.partition(" =")[0] for line in setup["options.entry_points"]["console_scripts"].split("\n") if line}
    assert {"cachefsd", "cachectl", "mount.cachefs", "cachefs-scheduler"} <= ours
    found = [template for _, template in workloads(list(every()))]
    for template in found:
        for container in template["spec"]["containers"] + template["spec"].get("initContainers", []):
            if container["image"].startswith("python:"):
                continue
            lines = [container["command"], *_executed(container)]
            if container["command"] == ["sh", "-c"]:
                lines += [line.split() for line in container["args"][0].splitlines()]
            for words in lines:
                program = words[1] if words[0] == "exec" else words[0]
                assert program in ours | PROGRAMS, words
    docker = (ROOT / "Dockerfile").read_text()
    assert "COPY scheduler_plugin scheduler_plugin" in docker
    assert '".[all]"' in docker


def _executed(container: Document) -> Iterator[list[str]]:
    for probe in ("readinessProbe", "livenessProbe"):
        if "exec" in container.get(probe, {}):
            yield container[probe]["exec"]["command"]
    for hook in container.get("lifecycle", {}).values():
        yield hook["exec"]["command"]


@pytest.mark.parametrize("file", ["base/cachefsd.toml", "elastic/cachefsd.toml"])
def test_the_daemons_take_their_configuration(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = "DaemonSet cachefsd" if file.startswith("base") else "StatefulSet cachefs-elastic"
    (container,) = [
        one for one in dict(workloads(list(every())))[owner]["spec"]["containers"] if one["name"] == "cachefsd"
    ]
    for variable in container["env"]:
        monkeypatch.setenv(variable["name"], "10.1.2.3" if variable["name"] == "POD_IP" else "node-7")
    config = daemon_config.load(DEPLOY / file)
    assert config.cluster.membership == "kubernetes"
    assert config.cluster.own_name == "node-7"
    assert config.cluster.advertised_hosts == ("10.1.2.3",)
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert config.cluster.listen_addresses == (("0.0.0.0", ports["blocks"]),)
    assert ports["control"] == ports["blocks"] + 1
    if hasattr(config.cluster, "schedulers"):
        own = tomllib.loads((DEPLOY / "base" / "cachefs-scheduler.toml").read_text())["cluster"]["name"]
        assert own in config.cluster.schedulers


def test_the_service_takes_its_configuration() -> None:
    config = scheduler_config.load(DEPLOY / "base" / "cachefs-scheduler.toml")
    assert config.kube is not None
    deployment = manifest(DEPLOY / "base" / "scheduler.yaml", "Deployment")["spec"]["template"]["spec"]
    (container,) = deployment["containers"]
    assert config.kube.listen == f"0.0.0.0:{container['ports'][0]['containerPort']}"
    tls = next(mount["mountPath"] for mount in container["volumeMounts"] if mount["name"] == "tls")
    assert {str(config.kube.tls_cert), str(config.kube.tls_key)} == {f"{tls}/tls.crt", f"{tls}/tls.key"}
    assert container["args"] == ["--config", "/etc/cachefs/cachefs-scheduler.toml"]


def routes() -> set[str]:
    async def made() -> set[str]:
        advice = FakeAdvisor()
        server = KubeServer(Extender(advice, PodGangs()), AdmissionWebhook(advice), StatusSources(str, lambda: True))
        return {route.resource.canonical for route in server._runner.app.router.routes() if route.resource is not None}

    return asyncio.run(made())


def test_who_asks_the_service_asks_for_paths_that_it_has() -> None:
    found = routes()
    for name in WHOLE:
        (hook,) = [each for each in build(DEPLOY / name) if each["kind"] == "MutatingWebhookConfiguration"]
        (webhook,) = hook["webhooks"]
        service = webhook["clientConfig"]["service"]
        assert service["path"] in found
        assert webhook["failurePolicy"] == "Ignore"
        (port,) = manifest(DEPLOY / "base" / "scheduler.yaml", "Service")["spec"]["ports"]
        assert (service["name"], service["namespace"], service["port"]) == (
            "cachefs-scheduler",
            "cachefs",
            port["port"],
        )
        assert f"'{DATASET}'" in webhook["matchConditions"][0]["expression"]
    (patch,) = kustomization(DEPLOY / "affinity")["patches"]
    assert yaml.safe_load(patch["patch"])[0]["value"] in found
    probe = manifest(DEPLOY / "base" / "scheduler.yaml", "Deployment")["spec"]["template"]["spec"]["containers"][0]
    assert probe["readinessProbe"]["httpGet"]["path"] in found
    assert manifest(DEPLOY / "elastic" / "monitor.yaml", "ServiceMonitor")["spec"]["endpoints"][0]["path"] in found


@pytest.mark.parametrize("path", ["kube-scheduler/configuration.yaml", "second-scheduler/configuration.yaml"])
def test_the_configuration_of_kube_scheduler_avoids_what_was_met(path: str) -> None:
    """Each of these was measured with kube-scheduler 1.36.2: docs/kubernetes.md."""
    (config,) = documents(DEPLOY / path)
    assert config["percentageOfNodesToScore"] == 100
    (extender,) = config["extenders"]
    known = {
        "urlPrefix", "filterVerb", "preemptVerb", "prioritizeVerb", "weight", "bindVerb", "enableHTTPS", "tlsConfig",
        "httpTimeout", "nodeCacheCapable", "managedResources", "ignorable",
    }  # fmt: skip
    assert set(extender) <= known
    assert extender["nodeCacheCapable"] is True
    assert extender["ignorable"] is True
    assert extender["enableHTTPS"] is True
    assert extender["weight"] > 0
    assert set(extender["tlsConfig"]) <= {"insecure", "serverName", "certFile", "keyFile", "caFile"}
    assert {f"/{extender['filterVerb']}", f"/{extender['prioritizeVerb']}"} <= routes()
    host = extender["tlsConfig"].get("serverName", extender["urlPrefix"].split("/")[2].split(":")[0])
    (certificate,) = [
        each for each in documents(DEPLOY / "cert-manager" / "certificates.yaml")
        if each["kind"] == "Certificate" and "dnsNames" in each["spec"]
    ]  # fmt: skip
    assert host in certificate["spec"]["dnsNames"]


def test_the_autoscaler_asks_for_what_the_adapter_makes_of_what_the_service_shows() -> None:
    (rules,) = documents(DEPLOY / "elastic" / "adapter-rules.yaml")
    metric = manifest(DEPLOY / "elastic" / "autoscaler.yaml", "HorizontalPodAutoscaler")["spec"]["metrics"][0]["object"]
    name = metric["metric"]["name"].removeprefix("cachefs_scheduler_")
    assert name in rules["rules"]["custom"][0]["seriesQuery"]
    assert (
        metric["describedObject"]["name"] == manifest(DEPLOY / "base" / "scheduler.yaml", "Service")["metadata"]["name"]
    )


def test_pods_of_the_example_ask_for_what_they_seem_to() -> None:
    (job,) = documents(DEPLOY / "example" / "job.yaml")
    template = job["spec"]["template"]
    metadata = ObjectMetadata(
        "train-imagenet-0-x7x7x", job["metadata"]["namespace"], "uid",
        labels={"batch.kubernetes.io/job-name": job["metadata"]["name"]},
        annotations=template["metadata"]["annotations"],
        owners=[OwnerReference("Job", job["metadata"]["name"], controller=True)],
    )  # fmt: skip
    found, warnings = parse_pod_job(Pod(metadata))
    assert warnings == ()
    assert found is not None
    assert found.request.job == "kube:training/job/train-imagenet"
    assert (found.request.policy.value, found.request.max_jobs_per_copy, found.request.ranks) == ("suspend", 2, 4)
    assert job["spec"]["completions"] == found.request.ranks
    # Where the DaemonSet mounts what the pods read.
    (read,) = template["spec"]["volumes"]
    daemon = manifest(DEPLOY / "base" / "daemons.yaml", "DaemonSet")["spec"]["template"]["spec"]
    mounts: Any = next(volume for volume in daemon["volumes"] if volume["name"] == "mounts")
    # The parent: a volume that is a mount point itself would keep the dead mount once it was made anew.
    assert read["hostPath"]["path"] == mounts["hostPath"]["path"]
    (volume,) = template["spec"]["containers"][0]["volumeMounts"]
    assert volume["mountPropagation"] == "HostToContainer"
    assert template["spec"]["containers"][0]["command"][-1].startswith(f"find {volume['mountPath']}/imagenet ")


def test_no_change_of_the_manifests_restarts_mounts_of_running_jobs_or_lets_two_replicas_act() -> None:
    daemons = manifest(DEPLOY / "base" / "daemons.yaml", "DaemonSet")["spec"]
    assert daemons["updateStrategy"] == {"type": "OnDelete"}
    assert manifest(DEPLOY / "base" / "scheduler.yaml", "Deployment")["spec"]["replicas"] == 1
    budget = manifest(DEPLOY / "base" / "scheduler.yaml", "PodDisruptionBudget")["spec"]
    assert budget["maxUnavailable"] == 1  # one replica never keeps its node from being drained


def test_certificates_made_by_hand_are_taken(tmp_path: Path) -> None:
    script = tmp_path / "make-certificates.sh"
    script.write_bytes((DEPLOY / "by-hand" / "make-certificates.sh").read_bytes())
    authority = tmp_path / "authority"
    environment = {**os.environ, "AUTHORITY": str(authority)}
    for _ in range(2):  # the second time with the authority that is there
        subprocess.run(["sh", str(script)], check=True, capture_output=True, timeout=60, env=environment)
    # The key of the authority is not beside what is applied, and nobody else's to read.
    assert not list(tmp_path.glob("ca.key*"))
    assert (authority / "ca.key").stat().st_mode & 0o777 == 0o600
    before = (authority / "ca.key").read_bytes()
    (authority / "ca.key").replace(tmp_path / "ca.key")  # where an earlier version has put it
    subprocess.run(["sh", str(script)], check=True, capture_output=True, timeout=60, env=environment)
    assert (authority / "ca.key").read_bytes() == before
    assert not (tmp_path / "ca.key").exists()
    ServerCertificates(PemFiles(tmp_path / "tls.crt", tmp_path / "tls.key", tmp_path / "ca.crt"))
    subprocess.run(
        ["openssl", "verify", "-CAfile", "ca.crt", "-verify_hostname", "cachefs-scheduler.cachefs.svc", "tls.crt"],
        cwd=tmp_path, check=True, capture_output=True, timeout=60,
    )  # fmt: skip
    patch = yaml.safe_load((tmp_path / "ca-bundle.yaml").read_text())
    (hook,) = documents(DEPLOY / "webhook" / "webhook.yaml")
    hook["webhooks"][0]["clientConfig"] |= {"caBundle": patch[0]["value"]}
    assert problems("admissionregistration.v1.MutatingWebhookConfiguration", hook) == []
    assert kustomization(DEPLOY / "by-hand")["secretGenerator"][0]["files"] == ["tls.crt", "tls.key", "ca.crt"]
