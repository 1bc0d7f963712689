"""The configuration of cachefs-scheduler: every problem is told in one line."""

import re
import tomllib
from pathlib import Path

import pytest

import cachefs_scheduler
from cachefs_scheduler.config import InvalidSchedulerConfig, KubeSection, SchedulerConfig, load

EXAMPLE = Path(cachefs_scheduler.__file__).parent / "cachefs-scheduler.toml"


def problems(tmp_path: Path, text: str) -> list[str]:
    path = tmp_path / "c.toml"
    path.write_text(text)
    with pytest.raises(InvalidSchedulerConfig) as failure:
        load(path)
    return failure.value.problems


def test_the_example_is_right_and_says_the_defaults() -> None:
    config = load(EXAMPLE)
    assert config == SchedulerConfig.model_validate({"cluster": {"nodes": ["127.0.0.1:7380"]}})
    assert "\n#ttl = 604800\n" in EXAMPLE.read_text()
    assert config.defaults.ttl == 604800
    whole = SchedulerConfig.model_validate(
        tomllib.loads(re.sub(r"^#(?=\S)", "", EXAMPLE.read_text(), flags=re.MULTILINE))
    )
    assert (whole.service, whole.cluster, whole.links, whole.queue, whole.defaults, whole.kube) == (
        *(config.service, config.cluster, config.links, config.queue, config.defaults),
        KubeSection(),
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[cluster]\nnodez = ["a:1"]', "cluster.nodez: is unknown; did you mean nodes?"),
        ('[datasets.x]\ncleanup = "often"', "datasets.x.cleanup = 'often': input should be 'none', 'ttl', 'lru' or"),
        ("", "cluster.nodes: is empty; name one daemon or some"),
        ('[cluster]\nnodes = ["a"]', "cluster.nodes.0 = 'a': expected HOST:PORT"),
        ('[service]\nlisten = "0.0.0.0:1"', "without certificates only loopback is safe"),
        ('[service]\ntls_ca = "/none"', "service.tls_cert: is missing"),
        ('[names]\na = "n"\nb = "n"', "names: 2 names of the scheduler stand for the node n"),
        ("[cluster", "c.toml: "),
        ('[kube]\ntls_cert = "/c"', "c.toml: kube: tls_cert and tls_key belong together"),
        ("[datasets.x]\nttk = 1", "datasets.x.ttk: is unknown; did you mean ttl?"),
        ('[kube]\nlisten_on = "a:1"', "kube.listen_on: is unknown; did you mean listen?"),
    ],
)
def test_what_is_wrong_is_told_in_a_line(tmp_path: Path, text: str, said: str) -> None:
    found = problems(tmp_path, text)
    assert any(said in one for one in found), found
    assert all("\n" not in one for one in found)


@pytest.mark.parametrize(
    ("listen", "more", "is_open"),
    [("127.0.0.1:1", "", True), ("localhost:1", "", True), ("0.0.0.0:1", "insecure = true", False)],
)
def test_who_may_ask_on_loopback_is_said(tmp_path: Path, listen: str, more: str, is_open: bool) -> None:
    path = tmp_path / "c.toml"
    path.write_text(f'[cluster]\nnodes = ["a:1"]\n[service]\nlisten = "{listen}"\n{more}\n')
    assert load(path).is_open_to_local_users is is_open


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidSchedulerConfig, match="No such file"):
        load(tmp_path / "none.toml")
