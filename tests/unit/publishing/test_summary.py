"""The lines that `cachefs run` says in the end, of what processes have left; and how these leave it."""

import dataclasses
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from cachefs.errors import DaemonUnavailable
from cachefs.hooks.loader import planned_epochs
from cachefs.publishing import run_record
from cachefs.publishing.exit_summary import format_duration, percent, summary_lines
from cachefs.publishing.mount_resolver import MountResolver
from cachefs.publishing.page import LoaderCounts
from cachefs.publishing.published_consumer import ConsumerOpening, PublishedConsumer
from cachefs.publishing.reporter import ConsumerReporter
from cachefs.publishing.run_figures import RunFigures
from cachefs.publishing.run_record import LoaderRecord, MountBytes, ProcessRecord
from cachefs.publishing.transport import DaemonTransport
from cachefs.publishing.trouble_lines import TroublePrinter
from cachefs.publishing.waiting import WaitTimes, explain_wait
from cachefs.rpc import DaemonClient

TRAIN = LoaderRecord(
    "Pictures (train.py:41)", epochs=3, samples=3000, busy=100.0, waited=50.0, first_busy=60.0, first_waited=45.0,
    bytes=3000e3, workers=2,
)  # fmt: skip
VAL = LoaderRecord("Pictures (train.py:42)", epochs=3, samples=300, busy=10.0, waited=0.0, bytes=300e3, workers=2)
MOUNTS = {"m /data": (MountBytes(10, 10, 10), MountBytes(300_010, 10, 600_010))}
ONE = ProcessRecord(1, True, [TRAIN, VAL], MOUNTS, stalls={"origin": 60.0})


def test_of_one_process() -> None:
    found = summary_lines([ONE])
    assert found == [
        "3 epochs, 3,300 samples in 1 min 50 s; the loop waited 45 % of the time",
        "  Pictures (train.py:41): 3 epochs, 3,000 samples, the loop waited 50 %",
        "  Pictures (train.py:42): 3 epochs, 300 samples, the loop waited 0 %",
        "served by: page cache 73 %, memory 9 %, origin 18 % of 3.147 MiB",
        "to wait less: it waited in the first epoch, whose bytes came from the origin: fetch them before the job "
        "(`cachectl warmup`), or give the origin more bandwidth",
    ]


def test_an_epoch_that_has_not_ended_does_not_count_as_a_whole_one() -> None:
    ended = dataclasses.replace(TRAIN, epochs=2, samples=380, epoch_length=300, epoch_samples=80)
    found = summary_lines([dataclasses.replace(ONE, loaders=[ended])])
    assert found[0].startswith("2 epochs (27 % of the last one), 380 samples in ")
    behind = dataclasses.replace(ended, epochs=1, samples=300, epoch_samples=300)
    other = dataclasses.replace(ended, samples=440, epoch_samples=140)
    ranks = [dataclasses.replace(ONE, pid=pid, loaders=[one]) for pid, one in enumerate((behind, ended, other))]
    assert summary_lines(ranks)[0].startswith("2 epochs (37 % of the last one), 1,120 samples in ")
    through = dataclasses.replace(ended, samples=600, epoch_samples=300)
    assert summary_lines([dataclasses.replace(ONE, loaders=[through])])[0].startswith("2 epochs, 600 samples in ")


def test_what_cannot_be_counted_in_samples_is_told_in_batches() -> None:
    streams = [dataclasses.replace(TRAIN, batches=31, unmeasured=1), dataclasses.replace(VAL, batches=4)]
    found = summary_lines([dataclasses.replace(ONE, loaders=streams)])
    assert found[0].startswith("3 epochs, 35 batches in ")
    assert [line.split(", ")[1] for line in found[1:3]] == ["31 batches", "300 samples"]


def test_ranks_that_read_through_one_mount_count_its_bytes_once() -> None:
    other = dataclasses.replace(ONE, pid=2, mounts={"m /data": (MountBytes(20, 10, 10), MountBytes(300_000, 10, 10))})
    found = summary_lines([ONE, other])
    assert found[0] == "3 epochs, 6,600 samples in 2 processes in 1 min 50 s; the loop waited 45 % of the time"
    assert "memory 5 %, origin 9 % of 6.294 MiB" in found[3]


def test_peers_have_their_part() -> None:
    found = summary_lines([dataclasses.replace(ONE, peer_bytes=300, fetched_bytes=100)])
    assert "other nodes 14 %, origin 5 %" in found[3]


def test_what_is_not_known_is_not_said() -> None:
    no_bytes = dataclasses.replace(ONE, loaders=[dataclasses.replace(TRAIN, bytes=0.0)])
    assert summary_lines([no_bytes])[1].endswith("(the share of the page cache is unknown)")
    away = dataclasses.replace(ONE, mounts={}, stalls={}, problem="the daemon does not answer")
    assert "the sources that served the reads are unknown: the daemon does not answer" in summary_lines([away])
    assert not any("more num_workers" in line for line in summary_lines([away]))
    assert summary_lines([]) == []
    assert summary_lines([ProcessRecord(1, loaders=[LoaderRecord("x")])]) == []


def test_many_loaders_have_an_end() -> None:
    loaders = [dataclasses.replace(TRAIN, name=f"x (a.py:{number})") for number in range(200)]
    found = summary_lines([dataclasses.replace(ONE, loaders=loaders)])
    assert len(found) <= 8
    assert "  and 196 other loaders" in found


@pytest.mark.parametrize(
    ("waited", "expected"),
    [
        (WaitTimes(100, 4), ""),
        (WaitTimes(0, 0), ""),
        (WaitTimes(100, 50, is_learning=True), "are being learned"),
        (WaitTimes(100, 50, 60, 45, was_learned=True), "in which its files were learned"),
        (WaitTimes(100, 50, 60, 45, 2, {"origin": 80.0}), "in the first epoch, whose bytes came from the origin"),
        (WaitTimes(100, 50, 60, 45, 2, {"origin": 1.0}), "decoding, in 2 workers"),
        (WaitTimes(100, 50, 60, 45, 2, {"origin": 20.0, "ssd": 80.0}), "waited for the SSD tier"),
        (WaitTimes(100, 50, is_unknown=True), "are not understood"),
        (WaitTimes(100, 50, 10, 5, 2, {"origin": 10.0, "ssd": 50.0}), "waited for the SSD tier"),
        (WaitTimes(100, 50, 10, 5, 2, {"peer": 50.0}), "other nodes of the cluster"),
        (WaitTimes(100, 50, 10, 5, 2, {"daemon": 50.0}), "while the daemon was down"),
        (WaitTimes(100, 50, 10, 5, 2, {"origin": 50.0}), "no room for all of the data"),
        (WaitTimes(100, 50, 10, 5, 2, {"origin": 1.0}, fetched_part=0.7), "waited for the origin"),
        (WaitTimes(100, 50, 10, 5, 2, {"origin": 1.0}), "decoding, in 2 workers"),
        (WaitTimes(100, 50, 10, 5, 0, {}), "decoding, in the training process"),
        (WaitTimes(100, 50, 10, 5, 2, has_figures=False), ""),
        (WaitTimes(0.3, 0.2, 0.3, 0.2, 2), ""),  # its workers have only just started
    ],
)
def test_why_a_loop_has_waited(waited: WaitTimes, expected: str) -> None:
    found = explain_wait(waited)
    assert expected in found
    assert bool(found) == bool(expected)


def test_times_and_shares() -> None:
    assert [format_duration(seconds) for seconds in (0.44, 59, 61, 3600, 90_000)] == [
        "0.4 s", "59 s", "1 min 1 s", "1 h 0 min", "1 d 1 h",
    ]  # fmt: skip
    assert [percent(part, 1000) for part in (0, 1, 500, 2000)] == ["0 %", "<1 %", "50 %", "100 %"]
    assert percent(1, 0) == "0 %"


def test_processes_leave_what_others_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CACHEFS_RUN", str(tmp_path))
    run_record.write_record(ONE)
    (tmp_path / "2.json").write_text("{")
    (tmp_path / "3.json").write_text('{"pid": 3}')
    (tmp_path / "4.json").write_text("[]")
    assert run_record.read_records(str(tmp_path)) == [ONE]
    assert run_record.read_records("/no/such") == []
    assert [run_record.is_first_to_print(line) for line in ("a", "b", "a")] == [True, True, False]


def test_directories_of_runs_that_are_over_are_removed() -> None:
    ours = run_record.make_run_directory()
    left = Path(ours).with_name(f"run-2147483647-{Path(ours).name.split('-')[2]}-left")
    left.mkdir()
    other = run_record.make_run_directory()
    try:
        assert not left.exists()
        assert os.path.isdir(ours)
    finally:
        for directory in (ours, other):
            run_record.remove_run(directory)
    assert not os.path.exists(ours)
    run_record.remove_run("/")  # which is none


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--epochs", "90"], 90),
        (["--data", "/d", "--epochs=3"], 3),
        (["--num-epochs", "5"], 5),
        (["--num_train_epochs", "2"], 2),
        (["trainer.max_epochs=7"], 7),
        (["--epochs", "ten"], 0),
        (["--epochs"], 0),
        (["--warmup-epochs", "5"], 0),
        (["--epochs", "3", "--max-epochs", "4"], 0),
        (["--epochs", "0"], 0),
        (["epochs", "5"], 0),
        ([], 0),
    ],
)
def test_epochs_that_arguments_name(arguments: list[str], expected: int) -> None:
    assert planned_epochs(arguments) == expected


def test_what_mounts_had_read_before_is_not_the_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CACHEFS_RUN", str(tmp_path))
    client = DaemonClient(tmp_path / "none")
    client.socket.touch()
    told = TroublePrinter(print)

    def answer_late(_: object, __: object, timeout: float) -> SimpleNamespace:
        if timeout < 1:
            raise DaemonUnavailable("no answer yet")
        return SimpleNamespace(mounts=[SimpleNamespace(id="m", mountpoint="/data", counters={"miss_bytes": 1 << 39})])

    monkeypatch.setattr(client, "call", answer_late)
    figures = RunFigures(client, ConsumerReporter(DaemonTransport(client), "job", 1, print, told), 1, "job", told)
    figures.record_start()
    monkeypatch.setattr(figures, "_request_mount_bytes", lambda: {"m /data": MountBytes(1 << 40)})
    figures.write_final([])
    [record] = run_record.read_records(str(tmp_path))
    assert record.mounts == {}
    assert record.problem == "the daemon did not answer as the job began"


def test_of_loaders_without_end_as_many_are_kept_as_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client, told = DaemonClient(tmp_path / "none"), TroublePrinter(print)
    figures = RunFigures(client, ConsumerReporter(DaemonTransport(client), "job", 1, print, told), 1, "job", told)
    for number in range(2 * run_record.MAX_LOADERS):
        opening = ConsumerOpening(slot=0, name="0", source="", length=1, dataset="Pictures", number=number)
        consumer = PublishedConsumer(opening, [], MountResolver([]))
        consumer.counts = LoaderCounts(epochs=1, samples=number)
        figures.record_end(consumer)
    assert len(figures._ended_loaders) == run_record.MAX_LOADERS
