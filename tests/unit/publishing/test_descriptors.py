"""Descriptors in a process whose job may close any number and open files of its own."""

import gc
import os
from pathlib import Path

import pytest

from cachefs.publishing import channel
from cachefs.publishing.channel import SOCKET_NAME, HelperConnection, HelperUnreachable
from cachefs.publishing.page import SharedPage
from cachefs.publishing.stderr import OwnDescriptor


def taken_by(path: Path, number: int) -> None:
    """The job closes the number, and gets it again for a file of its own."""
    opened = os.open(path, os.O_RDWR | os.O_CREAT)
    os.dup2(opened, number)
    if opened != number:
        os.close(opened)


def test_a_number_that_belongs_to_another_file_is_left_alone(tmp_path: Path) -> None:
    ours = OwnDescriptor(os.open(tmp_path, os.O_RDONLY))
    number = ours.number
    assert number is not None
    taken_by(tmp_path / "log", number)
    assert ours.number is None
    ours.close()
    del ours
    gc.collect()
    assert os.write(number, b"still open") == 10
    os.close(number)


def test_a_descriptor_is_closed_once(tmp_path: Path) -> None:
    ours = OwnDescriptor(os.open(tmp_path, os.O_RDONLY))
    number = ours.number
    assert number is not None
    ours.close()
    assert ours.number is None
    taken_by(tmp_path / "log", number)
    ours.close()
    os.close(number)


@pytest.fixture
def listener(tmp_path: Path) -> channel.socket.socket:
    made = channel._packet_socket()
    made.bind(str(tmp_path / SOCKET_NAME))
    made.listen(8)
    made.settimeout(10)
    return made


def test_a_line_whose_number_the_job_took_is_connected_anew(tmp_path: Path, listener: channel.socket.socket) -> None:
    with listener:
        line = HelperConnection(tmp_path)
        line.send({"op": 1})
        first, _ = listener.accept()
        number = line._descriptor.number
        assert number is not None
        taken_by(tmp_path / "log", number)
        assert not line.is_disconnected
        line.send({"op": 2})
        second, _ = listener.accept()
        with first, second:
            assert (first.recv(100), first.recv(100), second.recv(100)) == (b'{"op": 1}', b"", b'{"op": 2}')
        line.close()
        assert (tmp_path / "log").read_bytes() == b""
        assert os.write(number, b"the job's") == 9
        os.close(number)


def test_nothing_is_closed_as_a_line_is_collected(tmp_path: Path, listener: channel.socket.socket) -> None:
    with listener:
        number = HelperConnection(tmp_path)._descriptor.number
        gc.collect()
        assert number is not None
        os.close(number)


def test_a_full_helper_is_not_waited_for_without_wait(tmp_path: Path, listener: channel.socket.socket) -> None:
    """Whatever the job's default timeout is."""
    before = channel.socket.getdefaulttimeout()
    channel.socket.setdefaulttimeout(100)
    try:
        with listener:
            line = HelperConnection(tmp_path)

            def fill_up() -> None:
                for _ in range(10_000):
                    line.send({"op": "x" * 1000}, wait=False)

            with pytest.raises(HelperUnreachable):
                fill_up()
            line.close()
    finally:
        channel.socket.setdefaulttimeout(before)


def test_a_page_keeps_no_descriptor() -> None:
    made = SharedPage.create()
    before = os.listdir("/proc/self/fd")
    page = SharedPage(made)
    assert os.listdir("/proc/self/fd") == before
    page.set_ended(3)
    looking = SharedPage(Path(f"/proc/self/fd/{made}"))
    assert [looking.has_ended(slot) for slot in (2, 3)] == [False, True]
    page.clear_slot(3)
    assert not looking.has_ended(3)
    looking.close()
    with pytest.raises(ValueError, match="released"):
        looking.wanted_samples(0)
    page.close()
    os.close(made)
