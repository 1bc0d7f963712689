"""Figures and tables of `cachefs-bench programs`."""

import ast
import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from cachefs.errors import ConfigError
from cachefs.job_messages import ConsumerView, JobList, JobView
from cachefs.rpc import DaemonClient
from cachefs_bench.programs import command
from cachefs_bench.programs.catalogue import PROGRAMS, AccessPattern, find_programs
from cachefs_bench.programs.command import SCRIPTS
from cachefs_bench.programs.figures import (
    ProgramEpoch,
    ProgramOutcome,
    PublishedSequences,
    RunMode,
    best_removable_share,
    document,
    first_known_epoch,
    removed_share,
    warm_document,
)
from cachefs_bench.programs.report import aim_marks, markdown_table, replace_table, row, table
from cachefs_bench.programs.run import SequenceWatch

PROGRAM = PROGRAMS[0]
DOCS = Path(__file__).parents[3] / "docs"


def outcome(
    mode: RunMode, *waits: float, digest: str = "same", known: dict[str, dict[int, float]] | None = None
) -> ProgramOutcome:
    """Epochs of 10 s each, from second 100 on."""
    epochs = tuple(ProgramEpoch(100 + 10 * n, 110 + 10 * n, wait, 500) for n, wait in enumerate(waits))
    return ProgramOutcome(mode, digest, epochs, wall=10 * len(waits) + 3, published=PublishedSequences(known or {}))


def test_a_share_is_of_the_waits_beyond_the_native_ones() -> None:
    native, unpublished = outcome(RunMode.NATIVE, 1, 1), outcome(RunMode.BARE, 11, 1)
    assert removed_share(native, unpublished, outcome(RunMode.RUN, 2, 1)) == pytest.approx(0.9)
    assert removed_share(native, unpublished, outcome(RunMode.RUN, 16, 1)) == pytest.approx(-0.5)
    assert removed_share(native, outcome(RunMode.BARE, 1.2, 1), outcome(RunMode.RUN, 1, 1)) is None


def test_at_best_the_link_is_busy_from_the_first_moment() -> None:
    native, bare = outcome(RunMode.NATIVE, 1, 1), outcome(RunMode.BARE, 11, 1)  # 10 s of a native first epoch
    assert best_removable_share(native, [replace(bare, origin_bytes=150)], 10) == pytest.approx(0.5)
    assert best_removable_share(native, [replace(bare, origin_bytes=90)], 10) == 1
    assert best_removable_share(native, [replace(bare, origin_bytes=900)], 10) == 0
    assert best_removable_share(native, [replace(bare, origin_bytes=900)], 0) is None
    assert best_removable_share(native, [outcome(RunMode.BARE, 1.2, 1)], 10) is None


def test_at_best_what_the_first_samples_need_has_come_before_them() -> None:
    native, bare = outcome(RunMode.NATIVE, 1, 1), replace(outcome(RunMode.BARE, 11, 1), origin_bytes=90)
    first = native.epochs[0]
    native = replace(native, epochs=(replace(first, first=first.begin + 1), *native.epochs[1:]))
    assert best_removable_share(native, [replace(bare, first_bytes=60)], 10) == pytest.approx(0.5)
    assert best_removable_share(native, [replace(bare, first_bytes=10)], 10) == 1
    assert best_removable_share(native, [replace(bare, first_bytes=60), replace(bare, first_bytes=35)], 10) == 0.75


def test_what_came_is_counted_between_two_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    came = iter([100, 150, 400, 900])
    watch = SequenceWatch(DaemonClient(Path("/nowhere")), lambda: next(came))
    monkeypatch.setattr(DaemonClient, "call", lambda *_: JobList([]))
    for now in (1.0, 2.0, 3.0, 4.0):
        monkeypatch.setattr(time, "monotonic", lambda now=now: now)
        watch.poll_daemon()
    assert watch.first_bytes([ProgramEpoch(1.5, 9.0, 1.0, 5, first=3.9)]) == 400 - 150
    assert watch.first_bytes([ProgramEpoch(4.5, 9.0, 1.0, 5, first=6.0)]) == 0
    assert watch.first_bytes([]) == 0


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        ({}, None),
        ({"0": {}}, None),
        ({"0": {0: 99.0}}, (1, 0.0)),
        ({"0": {0: 104.0}}, (1, 0.4)),
        ({"0": {1: 109.0}}, (2, 0.0)),  # published ahead
        ({"0": {0: 112.0}}, (2, 0.2)),  # of the first epoch, when that was over
        ({"0": {0: 121.0}}, None),
        ({"0": {1: 110.5}, "1": {0: 105.0}}, (1, 0.5)),
        ({"0": {3: 101.0}}, (2, 0.0)),  # parts, which count as epochs
    ],
)
def test_since_when_an_order_is_known(known: dict[str, dict[int, float]], expected: tuple[int, float] | None) -> None:
    assert first_known_epoch(outcome(RunMode.RUN, 1, 1, known=known)) == expected


def test_the_document_of_a_program() -> None:
    found = document(
        PROGRAM,
        {
            RunMode.NATIVE: outcome(RunMode.NATIVE, 1, 1),
            RunMode.BARE: outcome(RunMode.BARE, 21, 1),
            RunMode.MOUNTED: outcome(RunMode.MOUNTED, 11, 1),
            RunMode.RUN: outcome(RunMode.RUN, 2, 1, known={"0": {0: 99.0}}),
        },
    )
    assert found["gone"] == {"mounted of bare": 0.5, "run of bare": 0.95, "run of mounted": 0.9}
    assert (found["equal"], found["known_from_epoch"], found["slower"]) == (True, 1, False)
    assert aim_marks(found) == ""
    assert row(found).split() == [PROGRAM.name, "1", "2.0", "22.0", "12.0", "3.0", "95", "%", "50", "%", "0"]
    json.dumps(found)


def test_what_is_not_as_it_should_be_is_marked() -> None:
    outcomes = {
        RunMode.NATIVE: outcome(RunMode.NATIVE, 1, 1),
        RunMode.MOUNTED: outcome(RunMode.MOUNTED, 11, 1),
        RunMode.RUN: outcome(RunMode.RUN, 14, 1, digest="another"),
    }
    assert aim_marks(document(PROGRAM, outcomes)) == "#!<"
    stream = replace(PROGRAM, access=AccessPattern.STREAM)
    outcomes[RunMode.RUN] = outcome(RunMode.RUN, 5, 1)
    assert aim_marks(document(stream, outcomes)) == ""
    assert aim_marks(document(PROGRAM, outcomes)) == "!"


def test_tables_fit_into_80_columns() -> None:
    known = {"0": {0: 105.0}}
    outcomes = {
        RunMode.NATIVE: outcome(RunMode.NATIVE, 100, 100),
        RunMode.BARE: outcome(RunMode.BARE, 500, 1001),
        RunMode.MOUNTED: outcome(RunMode.MOUNTED, 8000, 1000, digest="another"),
        RunMode.RUN: outcome(RunMode.RUN, 8000, 1000, known=known),
    }
    cold = [document(program, outcomes) for program in PROGRAMS]
    runs = {mode: [one] * 3 for mode, one in outcomes.items() if mode is not RunMode.BARE}
    text = table([{**one, **warm_document(program, runs)} for one, program in zip(cold, PROGRAMS, strict=True)])
    assert all(len(line) <= 80 for line in text.splitlines())
    assert all(f"\n{program.name} " in text for program in PROGRAMS)


def test_medians_of_warm_runs_are_compared() -> None:
    def runs(*seconds: float) -> list[ProgramOutcome]:
        return [ProgramOutcome(RunMode.RUN, "same", (ProgramEpoch(0, each, 0, 1),), wall=each + 1) for each in seconds]

    found = warm_document(
        PROGRAM, {RunMode.NATIVE: runs(2, 1, 9), RunMode.MOUNTED: runs(2, 2.02, 2.1), RunMode.RUN: runs(3, 3, 3)}
    )
    assert found["of_native"]["epochs"] == {"native": 1.0, "mounted": 1.01, "run": 1.5}
    assert found["of_native"]["wall"]["run"] == 1.333
    assert found["warm_equal"]


def test_what_was_known_is_remembered_when_the_daemon_forgets_it() -> None:
    watch = SequenceWatch(DaemonClient(Path("/nowhere")), lambda: 0)

    def view(epochs: list[int], problem: str = "") -> JobView:
        consumer = ConsumerView("0", 0, 0, 10, epochs, 0.0, 0, 0, "running", problem)
        return JobView("job", "bench", "", "", 0.0, "running", [consumer])

    watch.record_view(view([0, 1]), 1.0)
    watch.record_view(view([1, 2], "no memory"), 2.0)
    watch.record_view(view([]), 3.0)
    assert watch.published() == PublishedSequences({"0": {0: 1.0, 1: 1.0, 2: 2.0}}, ("no memory",))


def test_results_are_added_to(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    last, first = PROGRAMS[-1].name, PROGRAMS[0].name
    command.add_result(path, {"program": last, "modes": 1})
    command.add_result(path, {"program": first, "modes": 2})
    command.add_result(path, {"program": last, "warm": 3})
    assert list(command.load_results(path).values()) == [
        {"program": first, "modes": 2}, {"program": last, "modes": 1, "warm": 3},
    ]  # fmt: skip
    path.write_text("[1]")
    with pytest.raises(ConfigError, match=r"results\.json holds no results"):
        command.load_results(path)


def test_programs_are_chosen_by_name() -> None:
    assert [program.name for program in find_programs("npz, csv-pil,npz")] == ["npz", "csv-pil"]
    assert find_programs("") == list(PROGRAMS)
    with pytest.raises(ConfigError, match="no program is named 'imagenet'"):
        find_programs("npz,imagenet")


def test_the_catalogue_names_what_there_is() -> None:
    names = [program.name for program in PROGRAMS]
    assert len(set(names)) == len(names)
    tree = ast.parse((SCRIPTS / "make_dataset.py").read_text())
    (kinds,) = (node.value for node in tree.body if isinstance(node, ast.AnnAssign))
    assert isinstance(kinds, ast.Dict)
    made = {ast.literal_eval(key) for key in kinds.keys if key is not None}
    assert {program.data for program in PROGRAMS} == made
    scripts = {path.stem for path in SCRIPTS.glob("*.py")} - {"measuring", "make_dataset", "torchvision_without_cuda"}
    assert {program.script for program in PROGRAMS} == scripts


def test_the_page_has_the_table_of_its_results() -> None:
    documents = command.load_results(DOCS / "programs.json")
    assert documents
    page = (DOCS / "programs.md").read_text()
    assert page == replace_table(page, markdown_table(documents))
    assert all(f"\n| `{program.name}` | {program.title} |" in page for program in PROGRAMS)
    with pytest.raises(ConfigError, match="the page has no lines"):
        replace_table("# Nothing", markdown_table(documents))


def test_no_program_knows_of_cachefs() -> None:
    for path in SCRIPTS.glob("*.py"):
        assert "import cachefs" not in path.read_text(), path
        assert "from cachefs" not in path.read_text(), path
