"""A process has one channel, which is made when it is first asked for."""

import os
import signal
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

from cachefs.publishing import channel


@pytest.fixture
def starting(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The channels that are made. A signal comes while one is made."""
    made: list[Any] = []

    def make(job: str) -> Any:
        signal.raise_signal(signal.SIGUSR2)
        made.append(SimpleNamespace(job=job, is_ours=True))
        return made[-1]

    monkeypatch.setattr(channel, "_channel", None)
    monkeypatch.setattr(channel, "HelperChannel", make)
    return made


def test_a_signal_handler_that_interrupts_the_start_does_not_wait_for_it(
    starting: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[OSError] = []

    def handler(number: int, frame: FrameType | None) -> None:
        with pytest.raises(OSError, match="interrupted the start") as caught:
            channel.own_channel()
        heard.append(caught.value)

    monkeypatch.setattr(channel, "START_SECONDS", 1000)
    before = signal.signal(signal.SIGUSR2, handler)
    try:
        found = channel.own_channel()
        assert channel.own_channel() is found
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert starting == [found]
    assert len(heard) == 1


def test_a_start_that_a_signal_handler_has_ended_is_tried_again(starting: list[Any]) -> None:
    def handler(number: int, frame: FrameType | None) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGUSR2, handler)
    try:
        with pytest.raises(TimeoutError):
            channel.own_channel()
        signal.signal(signal.SIGUSR2, lambda *_: None)
        assert channel.own_channel() is starting[0]
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_a_directory_that_another_process_removes_at_the_same_time_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unlink = os.unlink
    directory = tmp_path / "job" / f"{os.getpid()}-x"
    directory.mkdir(parents=True)
    for name in "abc":
        (directory / name).touch()
    others: list[str] = []

    def late(path: str, **options: Any) -> None:
        if not others:  # the other process was quicker with this one, and has ended
            others.append(path)
            unlink(path, **options)
        unlink(path, **options)

    monkeypatch.setattr(os, "unlink", late)
    channel.remove_helper_directory(directory)
    assert others
    assert not directory.exists()
