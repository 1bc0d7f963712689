"""What `cachectl job show` and `job list` say of a job: how far, how long still, and why it waits."""

import io
from typing import Any

import msgspec
import pytest
from rich.console import Console

from cachefs.job_messages import ConsumerView, JobList, JobView, LoaderView
from cachefs.job_progress import group_by_loader, job_seconds_left, waited_share
from cachefs_tools.cachectl.job_page import describe, describe_jobs, job_row, percent, short_duration, state_text

TRAIN = LoaderView(
    name="Pictures (train.py:41)", epochs=3, planned=5, epoch_length=1000, epoch_samples=250, samples=2250,
    epoch_busy=10.0, busy=110.0, waited=44.0, first_busy=60.0, first_waited=40.0, workers=2,
)  # fmt: skip
VAL = LoaderView(
    name="Pictures (train.py:42)", epochs=2, planned=5, epoch_length=100, epoch_samples=100, samples=200,
    epoch_busy=5.0, busy=12.0, waited=0.1, workers=2,
)  # fmt: skip


def consumer(name: str, loader: LoaderView | None, state: str = "following", **fields: Any) -> ConsumerView:
    view = ConsumerView(name, 0, 0, 0, [], 0.0, 0, 0, state, loader=loader)
    return msgspec.structs.replace(view, **fields)


def job(*consumers: ConsumerView, state: str = "running", **fields: Any) -> JobView:
    return msgspec.structs.replace(JobView("j", "d", "3f9c", "cachefs run", 0.0, state, list(consumers)), **fields)


def text_of(view: JobView, **options: bool) -> str:
    screen = io.StringIO()
    Console(file=screen, width=80).print(*describe(view, **options))
    return screen.getvalue()


def test_an_ordinary_loop_of_training_and_validation() -> None:
    view = job(consumer("0", TRAIN, ahead_bytes=5 << 20), consumer("0.1", VAL))
    train, val = group_by_loader(view.consumers)
    assert (train.epoch, train.epochs, train.done_share, train.rate, train.epoch_seconds_left) == (
        3,
        5,
        0.25,
        25.0,
        30.0,
    )
    # Epochs after the first took 40 s; 30 s are left of this one, and two others follow.
    assert train.seconds_left == 110.0
    assert (val.epoch_seconds_left, val.seconds_left) == (0.0, 15.0)
    assert job_seconds_left([train, val]) == 125.0
    assert waited_share([train, val]) == pytest.approx(44.1 / 122)
    text = text_of(view)
    assert "epoch 2 of 5, about 2 min 5 s left" in text
    assert "the loop waited 36 % of the time" in text
    assert "RANKS" not in text
    assert "Pictures (train.py:41) following" in text
    assert "Pictures (train.py:42) following" in text
    assert "!" not in text
    assert job_row(view) == ("j", "d", "running", "1", "3/5", "25 %", "2m5s", "25/s", "36 %")


def test_a_job_that_ended_is_done_and_says_nothing_is_wrong() -> None:
    through = msgspec.structs.replace(TRAIN, epochs=5, epoch_samples=1000)
    view = job(consumer("0", through, "ended"), consumer("0.1", VAL, "ended"), state="ended")
    assert state_text(view) == "ended after 5 epochs"
    assert state_text(msgspec.structs.replace(view, reason="no heartbeat for 60 s")) == (
        "ended after 5 epochs (no heartbeat for 60 s)"
    )
    row = job_row(view)
    assert row[2:8] == ("ended", "1", "5/5", "100 %", "-", "-")
    assert "100 %" in text_of(view)
    assert " left" not in text_of(view)


def test_a_job_that_ended_within_an_epoch_says_so() -> None:
    part = msgspec.structs.replace(TRAIN, epochs=1, epoch_samples=320)
    assert state_text(job(consumer("0", part, "ended"), state="ended")) == "ended in epoch 1, 32 % done"
    assert state_text(job(consumer("0", None, "ended", epoch=4), state="cancelled")) == "cancelled in epoch 5"


def test_ranks_of_one_loader_are_one_row_of_the_one_that_is_behind() -> None:
    behind = msgspec.structs.replace(TRAIN, epoch_samples=100)
    view = job(consumer("0", TRAIN), consumer("1", behind, rank=1), consumer("1.1", VAL, rank=1))
    train, val = group_by_loader(view.consumers)
    assert (train.ranks, train.done_share, train.rate, val.ranks) == (2, 0.1, 35.0, 1)
    assert job_row(view)[3] == "2"
    assert text_of(view).count("Pictures (train.py:41)  ") == 1
    assert text_of(view, each_rank=True).count("Pictures (train.py:41)  ") == 2


def test_a_loader_that_learns_is_no_alarm() -> None:
    learning = msgspec.structs.replace(TRAIN, epochs=1, learning=True, busy=10.0, waited=9.0)
    text = " ".join(text_of(job(consumer("0", learning, "learning"))).split())
    assert "learning 1/5 25 %" in text
    assert "its files are being learned in this epoch, and read ahead from the next one on" in text
    assert "not followed" not in text
    assert "! " not in text


def test_consumers_without_a_loader_have_what_the_daemon_sees() -> None:
    one = consumer("0", None, epoch=1, position=500, epoch_length=2000, rate=100.0, epochs=4)
    view = job(one)
    assert job_row(view) == ("j", "d", "running", "1", "2/4", "25 %", "55s", "100/s", "-")
    assert "is not known: no DataLoader has given a batch yet" in " ".join(text_of(view).split())
    # Nobody knows whether the last samples of one that has ended were read.
    ended = msgspec.structs.replace(one, state="ended", position=1984)
    assert job_row(job(ended, state="ended"))[5] == "-"
    assert job_row(job(state="cancelled"))[3:] == ("0", "-", "-", "-", "-", "-")


def test_what_is_said_of_many_consumers_is_said_once_and_has_an_end() -> None:
    ones = [consumer(str(rank), TRAIN, rank=rank, problem="it stands") for rank in range(100)]
    text = text_of(job(*ones))
    assert text.count("it stands") == 1
    assert "! Pictures (train.py:41): it stands" in text
    others = [consumer(str(rank), None, rank=rank, note=f"note {rank}\x1b") for rank in range(100)]
    text = text_of(job(*others))
    assert text.count("note ") == 16
    assert "and 84 more, with --json" in text
    assert "\x1b" not in text


@pytest.mark.parametrize("name", ["x" * 300, "control\n\x1b[31m (a.py:1)"])
def test_it_fits_a_terminal(name: str) -> None:
    long = msgspec.structs.replace(TRAIN, name=name, epochs=999_998, planned=999_999, epoch_samples=1)
    view = job(*(consumer(str(rank), long, "standing still", rank=rank, ahead_bytes=10**11) for rank in range(1024)))
    lines = text_of(view).splitlines()
    assert all(len(line) <= 80 for line in lines)
    heading = next(line for line in lines if line.startswith("LOADER"))
    assert heading.split() == ["LOADER", "RANKS", "STATE", "EPOCH", "DONE", "LEFT", "RATE", "WAITED", "AHEAD"]
    assert "\x1b" not in text_of(view)


def test_shares_and_times_in_few_characters() -> None:
    assert [percent(share) for share in (0.0, 0.001, 0.5, 0.996, 1.0, 1.2)] == [
        "0 %", "<1 %", "50 %", "99 %", "100 %", "100 %",
    ]  # fmt: skip
    assert [short_duration(seconds) for seconds in (5, 125, 12_000, 200_000)] == ["5s", "2m5s", "3h20m", "2d7h"]


def test_the_time_that_a_job_still_takes_and_that_of_an_epoch_have_different_headings() -> None:
    view = job(consumer("0", TRAIN))
    screen = io.StringIO()
    Console(file=screen, width=100).print(*describe_jobs(JobList(jobs=[view], guessed=[])))
    assert screen.getvalue().split()[6] == "JOB-LEFT"
    assert " LEFT " in text_of(view)
