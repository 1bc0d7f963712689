"""The daemon's configuration: every problem in one go, each in one line that names key, value and expectation."""

import json
import os
import re
import shutil
import tomllib
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from cachefs.planning.eviction.policies import POLICIES
from cachefs.sizes import SizeSetting, format_size, parse_share, parse_size
from cachefs_cluster import config as cluster_config
from cachefs_cluster.config import ClusterConfig
from cachefs_daemon import config, live_settings
from cachefs_daemon.config import Config, InvalidConfig
from cachefs_daemon.origin_settings import origin_settings
from cachefs_daemon.section import LiveEffect
from cachefs_daemon.store_settings import store_config
from cachefsd.command import main

EXAMPLE = (resources.files("cachefs_daemon") / "cachefsd.toml").read_text()


def problems(values: dict[str, Any]) -> list[str]:
    with pytest.raises(InvalidConfig) as caught:
        config.parse(values)
    return caught.value.problems


@pytest.mark.parametrize(
    ("text", "size"),
    [("0", 0), (17, 17), ("4MiB", 4 << 20), ("4 MiB", 4 << 20), ("1.5g", 3 << 29), ("2GB", 2 * 10**9), ("7b", 7)],
)
def test_sizes(text: object, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "MiB", "4MB5", "-1", -1, True, 1.5, None, "4 % ", "1e9", "nan"])
def test_wrong_sizes(text: object) -> None:
    with pytest.raises(ValueError, match="expected a size"):
        parse_size(text)


@pytest.mark.parametrize("size", ["9" * 400, 1 << 61, "9" * 400 + "GiB"])
def test_sizes_that_nothing_has(size: object) -> None:
    with pytest.raises(ValueError, match="at most 1 EiB"):
        parse_size(size)


def test_shares() -> None:
    assert parse_share("25%").resolve(1000) == 250
    assert parse_share("4KiB").resolve(1000) == 4096
    assert parse_share("0%").resolve(1000) == 0
    for wrong in ("101%", "-5%", "%"):
        with pytest.raises(ValueError, match="percentage"):
            parse_share(wrong)


def test_sizes_are_shown_as_people_write_them() -> None:
    shown = [format_size(size) for size in (0, 1023, 1024, 3 << 29, 4 << 20)]
    assert shown == ["0 B", "1023 B", "1 KiB", "1.5 GiB", "4 MiB"]
    assert str(SizeSetting(percent=12.5)) == "12.5%"


def test_settings_that_take_effect_at_once() -> None:
    """A setting with the effect of another one would change without any."""
    assert set(live_settings._APPLY) == set(LiveEffect)
    assert config.live_effects(ClusterConfig) == {
        "daemon.log_level": LiveEffect.LOGGING,
        "daemon.log_format": LiveEffect.LOGGING,
        "memory.budget": LiveEffect.TIER_SIZES,
        "memory.min_free": LiveEffect.TIER_SIZES,
        "ssd.budget": LiveEffect.TIER_SIZES,
        "ssd.min_free": LiveEffect.TIER_SIZES,
    }


def test_the_example_shows_every_key_with_its_default() -> None:
    uncommented = re.sub(r"^#(?=\[|[a-z_]+ = )", "", EXAMPLE, flags=re.MULTILINE)
    shown = tomllib.loads(uncommented)
    assert cluster_config.parse(shown) == cluster_config.parse({"ssd": {}})
    assert {name: set(section) for name, section in shown.items()} == {
        name: set(section.model_fields) for name, section in config.sections_of(ClusterConfig).items()
    }


@pytest.mark.parametrize("value", [-1.5, 65, True, "many", "-1", None])
def test_fetch_processes_are_a_number_or_as_many_as_suit_the_machine(value: object) -> None:
    assert config.parse({"prefetch": {"processes": 3}}).fetch_processes == 3
    assert config.parse({"prefetch": {"processes": 0}}).fetch_processes == 0
    assert 0 <= config.parse({"prefetch": {"processes": "auto"}}).fetch_processes <= config.MAX_AUTO
    (problem,) = problems({"prefetch": {"processes": value}})
    assert problem == f'prefetch.processes = {value!r}: expected "auto" or a number from 0 to 64'


def test_the_example_as_it_is_means_the_defaults() -> None:
    assert config.parse(tomllib.loads(EXAMPLE)) == Config()


def test_all_problems_are_found_at_once() -> None:
    found = problems(
        {
            "daemon": {"polcy": "lru", "block_size": "4MB5", "read_deadline": 0, "log_level": "loud"},
            "memory": {"dir": "relative", "safety": 1},
            "ssd": 7,
            "orgin": {},
        }
    )
    assert found == [
        'daemon.block_size = \'4MB5\': expected a size such as "4MiB", "1.5GiB" or a number of bytes',
        "daemon.read_deadline = 0: expected greater than 0",
        "daemon.log_level = 'loud': expected 'debug', 'info', 'warning' or 'error'",
        "daemon.polcy: unknown key; did you mean `policy`?",
        "memory.dir = 'relative': expected an absolute path",
        "memory.safety: unknown key; `safety` belongs in [prefetch]",
        "ssd = 7: expected a table, [ssd]",
        "orgin: unknown key; did you mean `origin`?",
    ]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"daemon": {"block_size": "100KiB"}}, "daemon.block_size = 100 KiB: expected a multiple of 128 KiB"),
        ({"daemon": {"block_size": "96MiB"}, "memory": {"segment_size": "1GiB"}}, "from 128 KiB to 64 MiB"),
        ({"memory": {"budget": "1MiB"}}, "memory.budget = 1 MiB: smaller than one block of 4 MiB; give it at least"),
        ({"ssd": {"budget": "4MiB"}}, "ssd.budget = 4 MiB: smaller than one block of 4 MiB"),
        ({"memory": {"segment_size": "4MiB"}}, "memory.segment_size = 4 MiB: smaller than one block"),
        ({"ssd": {"dir": "/dev/shm/cachefs/x"}}, "ssd.dir = '/dev/shm/cachefs/x': overlaps memory.dir"),
        ({"origin": {"max_bytes_in_flight": "1MiB"}}, "expected at least daemon.block_size (4 MiB)"),
        ({"origin": {"max_listing": 0}}, "origin.max_listing = 0 B: expected at least 1 MiB"),
        ({"daemon": {"socket": "/" + "s" * 107}}, "longer than the 104 bytes"),
        ({"daemon": {"socket_group": "no-such-group"}}, "no such group on this machine"),
        ({"origin": {"max_connections": 0}}, "origin.max_connections = 0: expected greater than or equal to 1"),
        ({"daemon": {"read_deadline": float("inf")}}, "daemon.read_deadline = inf: expected"),
        ({"origin": {"read_timeout": 61}}, "origin.read_timeout = 61: longer than daemon.read_deadline (60)"),
        ({"daemon": {"read_deadline": 3}, "origin": {"connect_timeout": 4}}, "origin.connect_timeout = 4: longer than"),
        ({"origin": {"attempts": 8}}, "origin.attempts: is no longer used: a read is tried until"),
        ({"daemon": {"policy": "best"}}, f"daemon.policy = 'best': expected one of {', '.join(POLICIES)}"),
        ({"daemon": {"policy": 1}}, "daemon.policy = 1: expected one of"),
        ({"security": {"file_roots": ["data"]}}, "security.file_roots.0 = 'data': expected an absolute path"),
    ],
)
def test_contradictions_and_limits(values: dict[str, Any], said: str) -> None:
    (problem,) = problems(values)
    assert said in problem


@pytest.mark.parametrize(("removed", "used"), [("refcount", "clairvoyant"), ("lfu", "lru"), ("fifo", "lru")])
def test_a_removed_policy_starts_with_another_and_a_warning(tmp_path: Path, removed: str, used: str) -> None:
    parsed = config.parse({"daemon": {"policy": removed}})
    assert store_config(parsed).memory.policy == used
    assert parsed.summary().startswith(f"policy {used}, ")
    status, lines = checked(tmp_path / "c.toml", daemon={"policy": removed}, memory={"dir": str(tmp_path)})
    assert status == 0
    (said,) = [line for line in lines if "daemon.policy" in line]
    assert said.startswith(f"cachefsd: warning: daemon.policy = '{removed}': this policy is gone, and {used} is used")
    assert f'set policy = "{used}"' in said


def test_default_timeouts_leave_time_for_a_second_attempt() -> None:
    assert origin_settings(config.parse({})).read_timeout == 20
    short = origin_settings(config.parse({"daemon": {"read_deadline": 6}}))
    assert (short.connect_timeout, short.read_timeout) == (3, 3)
    given = origin_settings(config.parse({"daemon": {"read_deadline": 6}, "origin": {"read_timeout": 5}}))
    assert (given.connect_timeout, given.read_timeout) == (3, 5)


def test_there_is_an_ssd_tier_where_the_table_is(tmp_path: Path) -> None:
    assert store_config(config.parse({})).ssd is None
    assert store_config(config.parse({"ssd": {"budget": 0}})).ssd is None
    ssd = store_config(config.parse({"ssd": {"dir": str(tmp_path / "new"), "budget": "64MiB"}})).ssd
    assert ssd is not None
    assert (ssd.budget, ssd.directory) == (64 << 20, tmp_path / "new")
    assert ssd.min_free > 0


def test_check_config_exits_with_2_and_one_line_per_problem(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text('[daemon]\npolicy = "best"\nblock_size = 5\n[memori]\n')
    result = CliRunner().invoke(main, ["--config", str(path), "--check-config"])
    assert result.exit_code == 2
    lines = result.stderr.splitlines()
    assert [line for line in lines if not line.startswith(f"cachefsd: {path}: ")] == []
    assert len(lines) == 3
    assert "Traceback" not in result.output


def checked(path: Path, **sections: dict[str, object]) -> tuple[int, list[str]]:
    """Exit status and what is said of a file with these sections."""
    lines = [
        f"[{name}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in sections[name].items())
        for name in sections
    ]
    path.write_text("".join(lines))
    result = CliRunner().invoke(main, ["--config", str(path), "--check-config"])
    assert "Traceback" not in result.output
    return result.exit_code, result.stderr.splitlines()


def test_a_file_without_end_is_not_read_to_the_end() -> None:
    with pytest.raises(InvalidConfig, match="/dev/zero: is larger than 4 MiB"):
        config.load(Path("/dev/zero"))


def test_check_config_looks_at_the_directories_and_makes_none(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    status, said = checked(
        tmp_path / "c.toml",
        daemon={"state_dir": f"{tmp_path}/a/b"},
        memory={"dir": f"{tmp_path}/file", "budget": "64MiB"},
        ssd={"dir": f"{tmp_path}/open", "budget": "64MiB"},
    )
    assert status == 2
    assert [line.partition(" cannot be used: ")[0] for line in said[:-1]] == [
        f"cachefsd: state_dir {tmp_path}/a/b",
        f"cachefsd: [memory] dir {tmp_path}/file",
        f"cachefsd: [ssd] dir {tmp_path}/open",
    ]
    assert "warning: [memory] dir" in said[-1]
    assert "is on a disk" in said[-1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c.toml", "file", "open"]


def test_check_config_finds_budgets_that_cannot_be_had(tmp_path: Path) -> None:
    state = {"state_dir": f"{tmp_path}/state"}
    status, said = checked(tmp_path / "c.toml", daemon=state, memory={"dir": "/dev/shm/none", "budget": "900TiB"})
    assert (status, len(said)) == (2, 2)
    assert "warning: memory.budget = 900 TiB: more than the memory" in said[1]
    assert "the file system behind /dev/shm/none has only" in said[0]
    large = {"block_size": "64MiB"}
    memory = {"dir": "/dev/shm/none", "budget": (64 << 20) + (64 << 10), "segment_size": "128MiB"}
    status, said = checked(
        tmp_path / "c.toml", daemon=state | large, memory=memory, origin={"max_bytes_in_flight": "1GiB"}
    )
    assert (status, len(said)) == (2, 2)
    assert "warning: memory.budget = 64.06 MiB: holds no block" in said[1]
    assert "less than one block of 67108864 takes" in said[0]


def test_check_config_accepts_what_a_start_would_make(tmp_path: Path) -> None:
    ssd = {"dir": f"{tmp_path}/state/ssd", "budget": "64MiB", "require_mount": ""}
    sections = {"daemon": {"state_dir": f"{tmp_path}/state"}, "memory": {"dir": "/dev/shm/none", "budget": "64MiB"}}
    assert checked(tmp_path / "c.toml", **sections, ssd=ssd) == (0, [])
    status, said = checked(tmp_path / "c.toml", **sections, ssd=ssd | {"require_mount": f"{tmp_path}"})
    assert status == 2
    assert f"nothing is mounted on {tmp_path}" in said[0]


def test_check_config_by_root_says_whose_the_directories_are(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir(mode=0o750)
    os.chown(tmp_path / "state", 65534, 65534)
    memory = {"dir": "/dev/shm/none", "budget": "64MiB"}
    status, said = checked(tmp_path / "c.toml", daemon={"state_dir": f"{tmp_path}/state"}, memory=memory)
    assert status == 0
    assert "belongs to user nobody (65534): that is right only if the daemon runs as that user" in said[0]


@pytest.mark.parametrize("text", ["[daemon", "\xff\xfe", 'a = "b'])
def test_what_is_not_toml(tmp_path: Path, text: str) -> None:
    path = tmp_path / "c.toml"
    path.write_bytes(text.encode("latin-1"))
    result = CliRunner().invoke(main, ["--config", str(path)])
    assert result.exit_code == 2
    assert f"{path}: is not valid TOML" in result.stderr


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["--config", str(tmp_path / "none.toml")])
    assert result.exit_code == 2
    assert "none.toml: cannot be read: No such file" in result.stderr


def test_a_valid_file_is_explained(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text('[memory]\nbudget = "64MiB"\n')
    result = CliRunner().invoke(main, ["--config", str(path), "--check-config"])
    assert result.exit_code == 0, result.output
    assert "memory tier 64 MiB in /dev/shm/cachefs, ssd tier none" in result.stdout


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[memory]\nbudget = " + "9" * 5000, "is not valid TOML: Exceeds the limit"),
        ("[memory]\nbudget = " + "9" * 4000, "memory.budget = 9999"),
        ("[memory]\nbudget = '" + "9" * 5000 + "'", "memory.budget = '9999"),
        ('[memory]\ndir = "/a\\u0000b"', "memory.dir = '/a\\x00b': expected a path without NUL"),
        ('[daemon]\nsocket = "/a\\u0000b"', "expected a path without NUL"),
        ("[ssd]\ndir = '/dev/null/x'", "ssd.dir = '/dev/null/x': /dev/null is not a directory"),
        ("[memory]\ndir = '/" + "x" * 300 + "'", "File name too long"),
        ("x = " + "[" * 5000, "is not valid TOML"),
    ],
)
def test_whatever_the_file_holds_each_problem_is_a_short_line(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "c.toml").write_text(text)
    with pytest.raises(InvalidConfig) as caught:
        config.load(tmp_path / "c.toml")
    [problem] = caught.value.problems
    assert said in problem
    assert "\n" not in problem
    assert len(problem) < 500


def test_fetch_processes_that_never_run_are_remarked() -> None:
    (said,) = config.parse({"prefetch": {"enabled": False, "processes": 2}}).remarks()
    assert said == "prefetch.processes = 2: no fetch processes run, since prefetch.enabled is false"
    for quiet in ({"enabled": False}, {"enabled": False, "processes": 0}, {"processes": 2}):
        assert not list(config.parse({"prefetch": quiet}).remarks())


def test_more_than_there_is_is_remarked(tmp_path: Path) -> None:
    parsed = config.parse({"memory": {"budget": "900TiB"}, "ssd": {"budget": "900TiB", "dir": str(tmp_path / "ssd")}})
    memory, ssd = parsed.remarks()
    assert memory.startswith("memory.budget = 900 TiB: more than the memory that the daemon may use has")
    assert ssd.startswith(f"ssd.budget = 900 TiB: more than the file system of {tmp_path}/ssd has")
    state = {"state_dir": f"{tmp_path}/state"}
    large = {"dir": f"{tmp_path}/ssd", "budget": "900TiB"}
    status, said = checked(
        tmp_path / "c.toml", daemon=state, memory={"dir": "/dev/shm/none", "budget": "64MiB"}, ssd=large
    )
    assert (status, said) == (0, [f"cachefsd: warning: {ssd}"])


def test_a_typo_hides_no_other_problem(tmp_path: Path) -> None:
    said = problems(
        {
            "daemon": {"block_size": "100KiB", "polcy": "lru", "read_deadline": -1},
            "memory": {"budget": "1KiB"},
            "origin": {"max_listing": "1KiB"},
            "metric": {},
        }
    )
    assert [line.partition(":")[0].partition(" =")[0] for line in said] == [
        "daemon.read_deadline", "daemon.polcy", "metric", "daemon.block_size", "memory.budget", "origin.max_listing",
    ]  # fmt: skip
    said = problems({"ssd": {"dir": "/proc/foo"}, "daemon": {"block_size": "100KiB"}})
    assert [line.partition(" =")[0] for line in said] == ["ssd.dir", "daemon.block_size"]


def test_a_tier_on_a_file_system_without_room_is_refused() -> None:
    (said,) = problems({"ssd": {"dir": "/proc/foo"}})
    assert (
        said
        == "ssd.dir = '/proc/foo': it is on proc (of /proc), where nothing can be stored; choose a directory on a disk"
    )
    (said,) = problems({"memory": {"dir": "/sys/kernel"}})
    assert said.endswith("where nothing can be stored; choose a directory on tmpfs, as /dev/shm is")


def test_what_is_hardly_meant_is_a_warning(tmp_path: Path) -> None:
    state = {"state_dir": f"{tmp_path}/state"}
    memory = {"dir": "/dev/shm/none", "budget": "8MiB"}
    status, said = checked(tmp_path / "c.toml", daemon=state, memory=memory)
    assert (status, len(said)) == (0, 1)
    assert "warning: memory.budget = 8 MiB: holds 1 block of 4 MiB" in said[0]
    assert "give it at least 32.5 MiB" in said[0]
    memory["budget"] = "64MiB"
    ssd: dict[str, object] = {"dir": "/dev/shm/other", "budget": "64MiB"}
    status, said = checked(tmp_path / "c.toml", daemon=state, memory=memory, ssd=ssd)
    assert (status, len(said)) == (0, 1)
    assert "warning: [ssd] dir /dev/shm/other is in memory" in said[0]
    room = shutil.disk_usage(tmp_path).total
    ssd = {"dir": f"{tmp_path}/ssd", "budget": "95%", "min_free": "10%"}
    status, said = checked(tmp_path / "c.toml", daemon=state, memory=memory, ssd=ssd)
    assert (status, len(said)) == (0, 1)
    assert f"of {format_size(room)}, min_free" in said[0]


@pytest.mark.parametrize(
    "listen", ["", "127.0.0.1:9568", "localhost:1", "[::1]:65535", "unix:/run/cachefs/metrics.sock"]
)
def test_metrics_and_the_page_are_read_on_this_machine(listen: str) -> None:
    both = config.parse({"metrics": {"listen": listen}, "web": {"listen": listen}})
    assert (both.metrics.listen, both.web.listen) == (listen, listen)


@pytest.mark.parametrize(
    "listen", ["9568", ":9568", "0.0.0.0:9568", "node1:9568", "127.0.0.1:x", "[::1]:70000", "unix:a"]
)
@pytest.mark.parametrize("section", ["metrics", "web"])
def test_they_are_not_read_elsewhere(listen: str, section: str) -> None:
    (problem,) = problems({section: {"listen": listen}})
    assert problem.startswith(f"{section}.listen = {listen!r}: expected a port on loopback")
