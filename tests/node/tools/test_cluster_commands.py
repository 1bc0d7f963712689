"""cachectl ring and scale-hint, of two real daemons and of one that is alone."""

import json
import os
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from cachefs.job_messages import JobPublication
from cachefs.planning.sequences.sampler_spec import SamplerSpec
from cachefs.rpc import JOB_PUBLISH
from cachefs_bench.lab.ports import free_ports
from cachefs_tools.cachectl import main
from tests.daemon import Daemon
from tests.waiting import until

MIB = 1 << 20


def cachectl(daemon: Daemon, *words: str) -> Result:
    return CliRunner().invoke(main, [words[0], "--socket", str(daemon.socket), *words[1:]])


def document(daemon: Daemon, *words: str) -> Any:
    done = cachectl(daemon, *words, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.output)


def publish(daemon: Daemon, files: Path) -> None:
    daemon.add_dataset("data", files.as_uri())
    spec = SamplerSpec(kind="torch-distributed", size=20, epochs=5)
    daemon.client.call(JOB_PUBLISH, JobPublication(job="job", dataset="data", consumer="0", spec=spec, lease=600.0))


def made(files: Path) -> int:
    """Twenty files. Returns their bytes."""
    files.mkdir()
    for number in range(20):
        (files / f"{number:02}").write_bytes(os.urandom(1000 + number))
    return sum(1000 + number for number in range(20))


def test_a_cluster_has_a_ring_and_knows_what_its_jobs_need(tmp_path: Path) -> None:
    size = made(tmp_path / "files")
    ports = [free_ports(2)[0] for _ in range(2)]
    nodes = [f"{name}=127.0.0.1:{port}" for name, port in zip("ab", ports, strict=True)]
    own = [
        {"membership": "static", "name": name, "listen": f"127.0.0.1:{port}", "nodes": nodes}
        for name, port in zip("ab", ports, strict=True)
    ]
    with Daemon(tmp_path / "a", {"cluster": own[0]}) as first, Daemon(tmp_path / "b", {"cluster": own[1]}) as second:
        ring = document(first, "ring")
        assert [one["name"] for one in ring["nodes"]] in (["a", "b"], ["b", "a"])
        assert sum(one["homes"] for one in ring["nodes"]) == 1
        assert document(second, "ring") == ring
        diff = document(first, "ring", "--diff", "+c", "--diff", "-b")
        assert {one["name"] for one in diff["nodes"]} == {"a", "b", "c"}
        assert 0.6 < diff["moved"] < 0.7, "all of b's, and of a's what c takes"
        assert 0.45 < diff["least"] < 0.55
        wrong = cachectl(first, "ring", "--diff", "-z")
        assert (wrong.exit_code, wrong.output) == (
            1, "cachectl: no node of the ring is called 'z'; see `cachectl ring`\n",
        )  # fmt: skip
        publish(second, tmp_path / "files")
        hint = until(lambda: document(first, "scale-hint"), is_right=lambda hint: hint["needed"] == size)
        assert (hint["now"]["nodes"], hint["nodes_needed"], hint["now"]["kept"]) == (2, 1, size)
        assert hint["now"]["capacity"] == sum(one["capacity"] for one in hint["nodes"]) > 1000 * MIB


def test_a_node_alone_has_no_ring_but_knows_how_many_nodes_its_jobs_need(tmp_path: Path) -> None:
    size = made(tmp_path / "files")
    with Daemon(tmp_path / "a") as daemon:
        done = cachectl(daemon, "ring")
        assert done.exit_code == 1
        assert done.output.count("\n") == 1
        assert "in no cluster" in done.output
        assert "nothing is needed" in cachectl(daemon, "scale-hint").output
        publish(daemon, tmp_path / "files")
        hint = until(lambda: document(daemon, "scale-hint"), is_right=lambda hint: hint["needed"] == size)
        assert hint["one_fewer"] is None
        assert "1 node with room for" in cachectl(daemon, "scale-hint").output
