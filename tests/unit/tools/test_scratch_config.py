"""The configuration file of a scratch node says what its settings say."""

import tomllib
from pathlib import Path
from typing import Any

from cachefs_bench.lab.scratch_node import NodeSettings, TierSettings, configuration_text


def written(settings: NodeSettings, work: str = "/w") -> dict[str, Any]:
    return tomllib.loads(configuration_text(Path(work), Path("/dev/shm/m"), settings))


def test_every_setting_is_written() -> None:
    settings = NodeSettings(TierSettings(10, 1), TierSettings(20, 2), block_size=4096, policy="lru")
    assert written(settings) == {
        "daemon": {"socket": "/w/cachefsd.sock", "state_dir": "/w/state", "block_size": 4096, "policy": "lru"},
        "memory": {"dir": "/dev/shm/m", "budget": 10, "segment_size": 1},
        "ssd": {"dir": "/w/ssd", "budget": 20, "segment_size": 2, "min_free": 0},
    }


def test_what_is_left_to_the_daemon_is_not_written() -> None:
    assert written(NodeSettings(TierSettings(10), TierSettings(0))) == {
        "daemon": {"socket": "/w/cachefsd.sock", "state_dir": "/w/state"},
        "memory": {"dir": "/dev/shm/m", "budget": 10},
        "ssd": {"dir": "/w/ssd", "budget": 0, "min_free": 0},
    }


def test_a_path_may_have_any_name() -> None:
    odd = '/w "quoted" \\ snow \N{SNOWMAN}'
    assert written(NodeSettings(TierSettings(10), TierSettings(0)), odd)["ssd"]["dir"] == f"{odd}/ssd"
