"""A configuration that changes while the daemon runs."""

import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cachefs.errors import ConfigError
from cachefs.messages import Empty, LogLevel
from cachefs.rpc import LOG_LEVEL, RELOAD
from tests.cachectl import CACHECTL, cachectl_says
from tests.daemon import Daemon
from tests.waiting import until

BEFORE: dict[str, dict[str, Any]] = {"memory": {"budget": "64MiB"}, "daemon": {"log_level": "info"}}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with Daemon(tmp_path_factory.mktemp("reload") / "node", BEFORE) as daemon:
        yield daemon


@pytest.fixture
def daemon(running: Daemon) -> Iterator[Daemon]:
    yield running
    running.write_config(BEFORE)
    running.client.call(RELOAD, Empty())


def budget(daemon: Daemon) -> int:
    return daemon.status().tiers[0].budget


def test_a_budget_takes_effect_at_once_and_what_is_too_much_is_evicted(daemon: Daemon, tmp_path: Path) -> None:
    for number in range(10):
        (tmp_path / f"{number}").write_bytes(bytes([number]) * (4 << 20))
    daemon.add_dataset("data", f"file://{tmp_path}")
    cachectl_says(daemon.socket, "warmup", "data")
    assert daemon.status().tiers[0].used > 32 << 20
    daemon.write_config({**BEFORE, "memory": {"budget": "16MiB"}})
    answer = daemon.client.call(RELOAD, Empty())
    assert [(each.key, each.before, each.now) for each in answer.applied] == [("memory.budget", "64 MiB", "16 MiB")]
    assert answer.restart == []
    assert budget(daemon) == 16 << 20
    until(lambda: daemon.status().tiers[0].used <= 16 << 20)


def test_sighup_does_the_same_and_says_what_takes_a_restart(daemon: Daemon) -> None:
    daemon.write_config({"memory": {"budget": "32MiB"}, "daemon": {"log_level": "info", "policy": "lru"}})
    assert daemon.process is not None
    daemon.process.send_signal(signal.SIGHUP)
    until(lambda: budget(daemon) == 32 << 20)
    assert "daemon.policy = lru takes effect at the next start; it is still clairvoyant" in daemon.log.read_text()
    done = subprocess.run(
        [CACHECTL, "reload", "--socket", daemon.socket, "--json"], capture_output=True, check=False, timeout=60
    )
    assert done.returncode == 4
    assert json.loads(done.stdout) == {
        "applied": [], "restart": [{"key": "daemon.policy", "before": "clairvoyant", "now": "lru"}],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("sections", "why"),
    [
        ({"memory": {"budgt": "1GiB"}}, "did you mean `budget`"),
        ({"memory": {"budget": "64KiB"}}, "smaller than one block"),
        ({"memory": {"budget": "900TiB"}, "daemon": {"log_level": "debug"}}, "the file system behind"),
    ],
)
def test_a_wrong_file_changes_nothing(daemon: Daemon, sections: dict[str, dict[str, Any]], why: str) -> None:
    daemon.write_config(sections)
    with pytest.raises(ConfigError, match=why):
        daemon.client.call(RELOAD, Empty())
    assert budget(daemon) == 64 << 20
    assert daemon.client.call(LOG_LEVEL, LogLevel(level="")).level == "info"


def test_the_log_changes_while_the_daemon_runs(daemon: Daemon) -> None:
    assert daemon.client.call(LOG_LEVEL, LogLevel(level="debug")).level == "debug"
    with pytest.raises(ConfigError, match="expected one of debug"):
        daemon.client.call(LOG_LEVEL, LogLevel(level="loud"))
    daemon.write_config({**BEFORE, "daemon": {"log_level": "warning", "log_format": "json"}})
    daemon.client.call(RELOAD, Empty())
    assert daemon.client.call(LOG_LEVEL, LogLevel(level="")).level == "warning"
    daemon.write_config({**BEFORE, "daemon": {"log_level": "info", "log_format": "json", "read_deadline": 7}})
    daemon.client.call(RELOAD, Empty())
    last = json.loads(daemon.log.read_text().splitlines()[-1])
    assert last["message"] == "daemon.read_deadline = 7.0 takes effect at the next start; it is still 20.0"
