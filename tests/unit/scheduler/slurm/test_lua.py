"""The Lua files as they are shipped, in the languages that Slurm may be built with."""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cachefs_scheduler.slurm.hint import PLUGIN_DIRECTORY
from cachefs_scheduler.slurm.hint_file import HintHeading, HintStamp, divide_holders, hints_text

VERSIONS = ("lua51", "lua53", "lua54")
NO_VALUE = 4294967294
NODES = [f"n{number}" for number in range(64)]
SETS = {
    "two": divide_holders({"n1": 1.0, "n2": 1.0}, [NODES]),
    "graded": divide_holders({f"n{number}": 1.0 - number / 10 for number in range(8)}, [NODES]),
    "with.dots-and_more": divide_holders({"n1": 1.0}, [NODES]),
}


class Plugin:
    """cachefs.lua with a `slurm` that remembers what is said to it."""

    def __init__(self, version: str, hints: Path) -> None:
        self.runtime = importlib.import_module(f"lupa.{version}").LuaRuntime()
        self.said: list[str] = []
        self.runtime.globals().say = self.said.append
        self.runtime.execute(
            "slurm = {} for _, n in ipairs{'log_user','log_info','log_error','log_debug'} do "
            "slurm[n] = function(f, ...) say(n .. ': ' .. string.format(f, ...)) end end"
        )
        self.cachefs = self.runtime.execute((PLUGIN_DIRECTORY / "cachefs.lua").read_text())
        self.cachefs.file = str(hints)

    def submit(self, **wishes: object) -> Any:
        """What becomes of a job."""
        known = {"min_nodes": NO_VALUE, "min_cpus": NO_VALUE, "begin_time": 0, "priority": NO_VALUE, **wishes}
        job = self.runtime.table_from(known)
        self.cachefs.job_submit(job)
        return job


@pytest.fixture(params=VERSIONS)
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def hints(tmp_path: Path) -> Callable[..., Path]:
    def write(*, age: float = 0.0, steer: bool = True, wait: str = "begin", boot: str = "") -> Path:
        now = HintStamp.current()
        stamp = HintStamp(int(now.seconds - age), now.uptime - age, boot or now.boot)
        file = tmp_path / "hints"
        partitions = {"-": NODES, "small": ["n1", "n9"]}
        file.write_text(hints_text(HintHeading(stamp, 60, steer, wait, 120, 4), SETS, partitions))
        return file

    return write


GRADED = "[cachefs_graded_top1|cachefs_graded_top2|cachefs_graded_top4|cachefs_graded_some]"


def feature(level: str, dataset: str = "two") -> str:
    return f"cachefs_{dataset}_{level}"


@pytest.mark.parametrize(
    ("wishes", "prefer"),
    [
        ({"comment": "cachefs:two"}, feature("some")),
        ({"comment": "night; cachefs:two@latest,policy=clone"}, feature("some")),
        ({"comment": "cachefs:two", "min_nodes": 2}, feature("some")),
        ({"comment": "cachefs:two", "min_nodes": 5}, feature("some") + "*2"),
        ({"comment": "cachefs:two", "min_cpus": 9}, feature("some") + "*2"),
        ({"comment": "cachefs:two", "partition": "small,other", "min_nodes": 2}, feature("some") + "*1"),
        ({"comment": "cachefs:two", "features": "gpu,big"}, "gpu&big&" + feature("some")),
        ({"comment": "cachefs:two", "features": "gpu&big", "min_nodes": 3}, None),
        ({"comment": "cachefs:two", "features": "gpu|big"}, None),
        ({"comment": "cachefs:two", "features": "gpu*2"}, None),
        ({"comment": "cachefs:two", "features": "[rack1|rack2]"}, None),
        ({"comment": "cachefs:two", "prefer": "mine"}, "mine"),
        ({"comment": "cachefs:two", "req_nodes": "n7"}, None),
        ({"comment": "cachefs:unknown"}, None),
        ({"comment": "cachefs:t.o"}, None),
        ({"comment": "cachefs:with.dots-and_more"}, "cachefs_with.dots-and_more_some"),
        ({"comment": "cachefs:graded"}, GRADED),
        ({"comment": "cachefs:graded", "min_nodes": 3}, f"[{feature('top4', 'graded')}|{feature('some', 'graded')}]"),
        ({"comment": "cachefs:graded", "features": "gpu"}, "gpu&" + feature("top4", "graded")),
    ],
)  # fmt: skip
def test_what_is_preferred(
    version: str, hints: Callable[..., Path], wishes: dict[str, object], prefer: str | None
) -> None:
    assert Plugin(version, hints()).submit(**wishes).prefer == prefer


def test_what_the_job_reads_is_said_in_three_ways(version: str, hints: Callable[..., Path]) -> None:
    plugin = Plugin(version, hints())
    said = "#CACHEFS dataset=two policy=clone\n#CACHEFS max-jobs-per-copy=3\n"
    script = f"#!/bin/sh\n#SBATCH -N1\n\n{said}date\n#CACHEFS dataset=late\n"
    assert plugin.submit(script=script).admin_comment == "cachefs:two,policy=clone,max-jobs-per-copy=3"
    environment = plugin.runtime.table_from({"CACHEFS_DATASET": "graded"})
    assert plugin.submit(script=script, environment=environment).admin_comment.startswith("cachefs:graded,policy=clone")
    job = plugin.submit(script=script, environment=environment, comment="cachefs:two,policy=prefer", admin_comment="x")
    assert job.admin_comment == "x cachefs:two,policy=prefer,max-jobs-per-copy=3"
    assert plugin.submit(script="#!/bin/sh\ndate\n").admin_comment is None


@pytest.mark.parametrize("wait", ["begin", "hold"])
def test_who_waits(version: str, hints: Callable[..., Path], wait: str) -> None:
    plugin = Plugin(version, hints(wait=wait))
    job = plugin.submit(comment="cachefs:two,policy=suspend")
    if wait == "hold":
        assert (job.priority, job.begin_time) == (0, 0)
        assert job.admin_comment.endswith(",held=yes")
        return
    assert job.priority == NO_VALUE
    assert abs(job.begin_time - HintStamp.current().seconds - 120) < 60
    later = HintStamp.current().seconds + 5000
    job = plugin.submit(comment="cachefs:two,policy=suspend", begin_time=later)
    assert job.begin_time == later
    assert job.admin_comment == f"cachefs:two,policy=suspend,begin={later}"
    held = plugin.submit(comment="cachefs:two,policy=suspend", priority=0)
    assert (held.begin_time, held.admin_comment) == (0, "cachefs:two,policy=suspend")


def test_a_file_that_cannot_be_believed_is_ignored(version: str, hints: Callable[..., Path], tmp_path: Path) -> None:
    good = hints().read_text()
    texts = [
        hints(age=61).read_text(), hints(age=-60).read_text(), hints(age=61, boot="another").read_text(),
        good.removesuffix("end\n"), "", "cachefs-hints 2\n", good.replace("lasts 60", "lasts x"), "\0" * 100,
    ]  # fmt: skip
    for text in texts:
        (tmp_path / "hints").write_text(text)
        plugin = Plugin(version, tmp_path / "hints")
        job = plugin.submit(comment="cachefs:two,policy=suspend")
        assert (job.prefer, job.begin_time) == (None, 0)
        assert job.admin_comment == "cachefs:two,policy=suspend"
        assert plugin.said[0].startswith("log_info: cachefs: no hint for a job that reads two")
    job = Plugin(version, tmp_path / "none").submit(comment="cachefs:two")
    assert job.prefer is None


def test_where_slurm_would_refuse_jobs_nothing_is_preferred(version: str, hints: Callable[..., Path]) -> None:
    assert Plugin(version, hints(steer=False)).submit(comment="cachefs:two").prefer is None


@pytest.mark.parametrize(
    "comment", ["cachefs:two,policy=x", "cachefs:../two", "cachefs:two,max-jobs-per-copy=-1", "cachefs:" + "a" * 999]
)
def test_a_wrong_wish_is_told_to_the_user(version: str, hints: Callable[..., Path], comment: str) -> None:
    plugin = Plugin(version, hints())
    job = plugin.submit(comment=comment)
    assert (job.prefer, job.admin_comment) == (None, None)
    assert plugin.said[0].startswith("log_user: cachefs: ")


def test_an_error_in_lua_stops_no_job(version: str, hints: Callable[..., Path]) -> None:
    plugin = Plugin(version, hints())
    plugin.submit(comment=5)
    plugin.cachefs.job_submit(None)
    assert any(line.startswith("log_error: cachefs: a job is taken as it is") for line in plugin.said)


def test_srun_says_it_in_its_comment(version: str, hints: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    plugin = Plugin(version, hints())
    monkeypatch.setenv("CACHEFS_DATASET", "two")
    plugin.runtime.globals().os.getenv = {"CACHEFS_DATASET": "two"}.get
    options = plugin.runtime.table_from({"nodes": "2-4", "constraint": "gpu"})
    plugin.cachefs.cli_filter(options)
    assert options["comment"] == "cachefs:two,policy=prefer"
    assert options["prefer"] == "gpu&" + feature("some")


@pytest.mark.parametrize(
    "job",
    [
        {"script": "#!/bin/sh\n#CACHEFS " + "a" * 4_000_000 + "\ntrue\n"},
        {"script": "#!/bin/sh\n" + ("#CACHEFS " + "a" * 900 + "\n") * 4000},
        {"script": "#!/bin/sh\n#CACHEFS " + "a=b " * 1_000_000},
        {"comment": "x cachefs:a," + "a" * 60_000},
        {"comment": "cachefs:" * 8000},
    ],
    ids=["one word", "many words", "many pairs", "comment", "tags"],
)
def test_no_text_of_a_user_keeps_the_controller_busy(version: str, hints: Callable[..., Path], job: Any) -> None:
    # It waits while Lua runs. One word of 200,000 letters took it minutes.
    plugin = Plugin(version, hints())
    assert plugin.submit(**job).admin_comment in (None, "cachefs:a,policy=prefer")


def test_a_users_words_are_no_format(version: str, hints: Callable[..., Path]) -> None:
    plugin = Plugin(version, hints())
    plugin.submit(comment="cachefs:%d%s%99999s")
    assert plugin.said == ["log_user: cachefs: no name of a dataset: %d%s%99999s; the job is taken as it is"]
