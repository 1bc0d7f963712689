"""`cachectl debug-bundle` of a node with secrets planted everywhere: none of them is in the file."""

import base64
import json
import os
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from cachefs.errors import CachefsError
from tests.cachectl import cachectl
from tests.daemon import Daemon
from tests.mounting import mounted

# Of several kinds, none of which is a word: as AWS, Azure and others make them.
SECRETS = {
    "access": "AKIAIOSFODNN7PLANTED",
    "secret": "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",
    "session": "IQoJb3JpZ2luX2VjEPLANTED//////////wEaCXVzLWVhc3QtMSJH",
    "own": "cachectl's own p@ssword-planted",
    "profile": "3fK9xPlantedInCredentialsFile0000000000",
    "sas": "sv%3D2024PlantedSas%2Fq8Z7tN0fQ2yW1",
    "userinfo": "planted-user-password",
    "config": "5f4dcc3b5aa765d61d8327deb882cf99planted",
    "name": "hf_PlAnTeDqWeRtYuIoPaSdFgHjKlZx",
    "log": "MIIEvQIBADANBgkqhkiG9w0BAQEFAASCBKcwggSjPLANTED",
}


def forms(secret: str) -> set[str]:
    encoded = base64.b64encode(secret.encode()).decode().rstrip("=")
    return {secret, quote(secret, safe=""), quote(secret), encoded, json.dumps(secret)[1:-1]}


def bundle(
    daemon: Daemon, output: Path, *arguments: str | Path, environment: Mapping[str, str] | None = None
) -> tuple[dict[str, Any], dict[str, str]]:
    """(what cachectl answers, name -> text of the files in the bundle)."""
    words = ["debug-bundle", "--json", "-o", output, *arguments]
    done = cachectl(daemon.socket, *words, environment=environment)
    assert done.returncode in (0, 4), done.stderr
    with tarfile.open(output) as tar:
        texts = {Path(member.name).name: tar.extractfile(member).read().decode() for member in tar}  # type: ignore[union-attr]
    return json.loads(done.stdout), texts


def planted(tmp_path: Path) -> tuple[dict[str, str], dict[str, str], Path, Path]:
    """(the daemon's variables, cachectl's, a configuration file, a log), with secrets in them."""
    home = tmp_path / "home"
    (home / ".aws").mkdir(parents=True)
    (home / ".aws/credentials").write_text(f"[default]\naws_secret_access_key = {SECRETS['profile']}\n")
    of_daemon = {
        "AWS_ACCESS_KEY_ID": SECRETS["access"], "AWS_SECRET_ACCESS_KEY": SECRETS["secret"],
        "AWS_SESSION_TOKEN": SECRETS["session"], "https_proxy": f"http://me:{SECRETS['userinfo']}@proxy.example:3128",
    }  # fmt: skip
    of_user = {"MY_PASSWORD": SECRETS["own"], "HOME": str(home)}
    config = tmp_path / "config.toml"
    config.write_text(
        f'[daemon]\napi_token = "{SECRETS["config"]}"\nlog_level = "info"\n[vault]\nx = "{SECRETS["secret"]}"\n'
    )
    log = tmp_path / "mount.log"
    log.write_text(
        f"-----BEGIN PRIVATE KEY-----\n{SECRETS['log']}\n-----END PRIVATE KEY-----\n"
        f"GET https://a.example/c/k?sig={SECRETS['sas']}\n"
        f"Authorization: AWS4-HMAC-SHA256 Credential={SECRETS['access']}/x\n"
        f"{SECRETS['own']} and {quote(SECRETS['secret'], safe='')} and {SECRETS['profile']} were refused\n"
        "mounted on /data/planted\n"
    )
    return of_daemon, of_user, config, log


def test_no_secret_is_in_it_and_what_helps_is(tmp_path: Path) -> None:
    of_daemon, of_user, config, log = planted(tmp_path)
    source = tmp_path / "source"
    source.mkdir()
    odd = f"token={SECRETS['name']}.bin"
    (source / odd).write_bytes(b"x" * 1000)
    (source / "plain.bin").write_bytes(b"y" * 1000)
    node = Daemon(tmp_path / "node", environment=of_daemon)
    with node as daemon, mounted_tree(daemon, source, tmp_path / "mnt"):
        fails_to_read(daemon, source / odd, odd)
        answer, texts = bundle(daemon, tmp_path / "b.tar.gz", "--config", config, "--log", log, environment=of_user)
        whole = "\n".join(texts.values()) + json.dumps(answer)
        for name, secret in SECRETS.items():
            for form in forms(secret):
                assert form not in whole, name
        # And a maintainer sees what he needs.
        status = json.loads(texts["status.json"])
        assert status["instance"] == daemon.status().instance
        assert status["errors"][0]["message"]
        assert json.loads(texts["config.json"])["daemon"] == {"log_level": "info"}
        assert json.loads(texts["versions.json"])["packages"]["grpcio"]
        assert "AWS_SESSION_TOKEN" in json.loads(texts["environment.json"])["not shown"]
        assert len(json.loads(texts["processes.json"])["daemon"]) > 1
        assert json.loads(texts["mounts.json"])["cachefs"]
        assert "mounted on /data/planted" in texts["log-1.txt"]
        assert {each["name"] for each in answer["files"]} == set(texts)
        assert oct((tmp_path / "b.tar.gz").stat().st_mode)[-3:] == "600"


def test_without_names(tmp_path: Path) -> None:
    source = tmp_path / "faces-of-alice"
    source.mkdir()
    (source / "portrait.bin").write_bytes(b"x" * 1000)
    with Daemon(tmp_path / "node") as daemon, mounted_tree(daemon, source, tmp_path / "mnt", "portraits"):
        fails_to_read(daemon, source / "portrait.bin", "portrait.bin", "portraits")
        answer, texts = bundle(daemon, tmp_path / "b.tar.gz", "--no-names")
    whole = "\n".join(texts.values()) + json.dumps(answer["left_out"])
    for name in ("faces-of-alice", "portrait.bin", "portraits", str(tmp_path), os.uname().nodename):
        assert name not in whole, name
    datasets = json.loads(texts["datasets.json"])["datasets"]
    spec = json.loads(texts["status.json"])["mounts"][0]["spec"]
    assert datasets[0]["name"] == spec
    assert spec.startswith("dataset-")


def test_without_a_daemon_it_says_what_is_missing(tmp_path: Path) -> None:
    output = tmp_path / "b.tar.gz"
    done = cachectl(tmp_path / "s", "debug-bundle", "-o", output)
    assert done.returncode == 4, done.stderr
    assert "LEFT-OUT" in done.stdout
    assert "does not answer" in done.stdout or "no socket" in done.stdout
    assert "doctor.json" in done.stderr  # what it will have, before
    again = cachectl(tmp_path / "s", "debug-bundle", "-o", output)
    assert again.returncode == 1
    assert "exists already" in again.stderr


def mounted_tree(daemon: Daemon, source: Path, directory: Path, name: str = "tree") -> Any:
    daemon.add_dataset(name, f"file://{source}")
    return mounted(daemon.socket, name, directory)


def fails_to_read(daemon: Daemon, file: Path, path: str, name: str = "tree") -> None:
    """Have the daemon say of a file that it cannot be read."""
    view = daemon.refresh_dataset(name).dataset
    assert view is not None
    file.write_bytes(b"other")
    try:
        daemon.read(view, path)
    except (OSError, CachefsError):
        return
    raise AssertionError("it was read")
