"""Calls of several lines through the control file: what is put together is what was sent, or nothing."""

import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachefs.control_calls import (
    MAX_LINE_BYTES,
    MAX_REQUEST_BYTES,
    PART_BYTES,
    VERSION,
    CallResponse,
    RequestEnd,
    RequestPart,
    call_lines,
    format_token,
    parse_fifo_token,
    response_fifo_name,
)
from cachefs.errors import Busy, CachefsError, ConfigError, NotFound
from cachefs.job_messages import JobEpoch, JobPublication
from cachefs.mount.control import calls
from cachefs.mount.control.calls import PART_SECONDS, ControlLine, IncompleteRequests, decode_line, translate_call
from cachefs.mount.control.line_reader import make_error_response
from cachefs.rpc import DATASET_REMOVE, JOB_EPOCH, JOB_PUBLISH, encode

TOKEN = format_token(7)


def parsed(request: bytes, number: int = 1, token: str = TOKEN) -> list[ControlLine]:
    return [decode_line(line) for line in call_lines(token, number, JOB_EPOCH.name, request)]


def taken(requests: IncompleteRequests, lines: list[ControlLine], now: float = 0.0) -> bytes:
    """What is complete with the last of the lines."""
    *parts, call = lines
    for part in parts:
        assert isinstance(part, RequestPart)
        requests.add_part(part, now)
    assert isinstance(call, RequestEnd)
    return requests.complete_request(call, now)


@given(st.integers(0, 4 * PART_BYTES), st.integers(0, (1 << 53) - 1), st.integers(0))
def test_lines_are_short_and_tell_all(size: int, number: int, seed: int) -> None:
    request = random.Random(seed).randbytes(size)
    lines = list(call_lines(TOKEN, number, JOB_EPOCH.name, request))
    assert max(map(len, lines)) <= MAX_LINE_BYTES
    assert all(line.endswith(b"\n") and line.count(b"\n") == 1 for line in lines)
    assert taken(IncompleteRequests(), [decode_line(line) for line in lines]) == request


def test_the_longest_request_fits() -> None:
    last = MAX_REQUEST_BYTES - MAX_REQUEST_BYTES % PART_BYTES
    line = msgspec.json.encode(RequestPart(TOKEN, (1 << 53) - 1, last, bytes(PART_BYTES)))
    assert len(line) < MAX_LINE_BYTES


@given(st.lists(st.tuples(st.integers(0, 3), st.binary(max_size=3 * PART_BYTES)), max_size=4), st.randoms())
def test_callers_do_not_disturb_each_other(sent: list[tuple[int, bytes]], chance: random.Random) -> None:
    """Each has a token of its own, and their lines come in any order, those of each in its own."""
    queues = [parsed(request, 1, format_token(number)) for number, (_, request) in enumerate(sent)]
    requests, found = IncompleteRequests(), {}
    while any(queues):
        number = chance.choice([number for number, queue in enumerate(queues) if queue])
        line = queues[number].pop(0)
        if isinstance(line, RequestPart):
            requests.add_part(line, 0)
        else:
            assert isinstance(line, RequestEnd)
            found[number] = requests.complete_request(line, 0)
    assert found == {number: request for number, (_, request) in enumerate(sent)}


@given(st.data())
def test_what_is_lost_or_changed_is_refused(data: st.DataObject) -> None:
    request = bytes(range(256)) * 40
    lines = parsed(request)
    del lines[data.draw(st.integers(0, len(lines) - 2))]
    with pytest.raises(Busy):
        taken(IncompleteRequests(), lines)
    whole = parsed(request)
    whole[0] = msgspec.structs.replace(whole[0], data=bytes(PART_BYTES))
    with pytest.raises(ConfigError, match="their checksum differs"):
        taken(IncompleteRequests(), whole)


def test_what_was_begun_and_stays_away_is_forgotten() -> None:
    requests = IncompleteRequests()
    lines = parsed(bytes(2 * PART_BYTES + 1))
    assert isinstance(lines[0], RequestPart)
    requests.add_part(lines[0], 0)
    with pytest.raises(Busy, match="does not follow the bytes received so far"):
        taken(requests, lines[1:], PART_SECONDS + 1)
    assert not requests._incomplete
    assert requests._bytes == 0


def test_what_is_begun_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = IncompleteRequests()
    part = RequestPart(TOKEN, 0, 0, bytes(100))
    for number in range(2 * calls.MAX_INCOMPLETE):
        requests.add_part(msgspec.structs.replace(part, id=number), 0)
    assert len(requests._incomplete) == calls.MAX_OF_CALLER
    for number in range(2 * calls.MAX_INCOMPLETE):
        requests.add_part(msgspec.structs.replace(part, answers=format_token(number)), 0)
    assert len(requests._incomplete) == calls.MAX_INCOMPLETE
    monkeypatch.setattr(calls, "MAX_BYTES", 250)
    requests = IncompleteRequests()
    for number in range(10):
        requests.add_part(msgspec.structs.replace(part, answers=format_token(number)), 0)
        requests.add_part(msgspec.structs.replace(part, answers=format_token(number), at=100), 0)
    assert requests._bytes == 200
    requests = IncompleteRequests()
    monkeypatch.setattr(calls, "MAX_REQUEST_BYTES", 150)
    requests.add_part(part, 0)
    with pytest.raises(ConfigError, match="use the daemon's socket"):
        requests.add_part(msgspec.structs.replace(part, at=100), 0)


def test_who_begins_many_calls_keeps_no_other_caller_out() -> None:
    requests = IncompleteRequests()
    mine = parsed(bytes(2 * PART_BYTES + 1))
    strangers = iter(range(100, 100_000))

    def flood(count: int) -> None:
        for _ in range(count):
            requests.add_part(RequestPart(format_token(next(strangers)), 1, 0, b"x"), 0)

    flood(2 * calls.MAX_INCOMPLETE)
    for line in mine[:-1]:
        assert isinstance(line, RequestPart)
        requests.add_part(line, 0)
        flood(calls.MAX_INCOMPLETE - 2)
    assert taken(requests, mine[-1:]) == bytes(2 * PART_BYTES + 1)
    requests.add_part(mine[0], 0)  # type: ignore[arg-type]
    flood(calls.MAX_INCOMPLETE)
    with pytest.raises(Busy, match="try again"):
        taken(requests, mine[-1:])


def test_a_user_who_begins_many_calls_takes_no_room_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many tokens the user has, and however large the calls are."""
    monkeypatch.setattr(calls, "MAX_BYTES", 100 * PART_BYTES)
    requests = IncompleteRequests()
    mine, theirs = parsed(bytes(40 * PART_BYTES + 1)), parsed(bytes(2 * PART_BYTES + 1), token=format_token(8))
    strangers = iter(range(100, 100_000))

    def flood() -> None:
        token = format_token(next(strangers))
        for at in range(0, 10 * PART_BYTES, PART_BYTES):
            requests.add_part(RequestPart(token, 1, at, bytes(PART_BYTES)), 0, 1000)

    def flood_with_small() -> None:
        for _ in range(2 * calls.MAX_INCOMPLETE):
            requests.add_part(RequestPart(format_token(next(strangers)), 1, 0, b"x"), 0, 1000)

    requests.add_part(theirs[0], 0)  # type: ignore[arg-type]  # of a user who is not known
    for line in mine[:-1]:
        assert isinstance(line, RequestPart)
        requests.add_part(line, 0, 2000)
        flood()
        flood_with_small()
    assert taken(requests, mine[-1:]) == bytes(40 * PART_BYTES + 1)
    assert taken(requests, theirs[1:]) == bytes(2 * PART_BYTES + 1)
    assert requests._bytes <= calls.MAX_BYTES
    assert requests._bytes == sum(len(begun.data) for begun in requests._incomplete.values())


def test_a_user_alone_has_all_the_room_and_is_told_where_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "MAX_BYTES", 250)
    requests = IncompleteRequests()
    requests.add_part(RequestPart(TOKEN, 1, 0, bytes(200)), 0, 1000)
    with pytest.raises(Busy, match="try again"):
        requests.add_part(RequestPart(TOKEN, 1, 200, bytes(100)), 0, 1000)
    assert requests._bytes == 0


@pytest.mark.parametrize(
    "line",
    [
        b'{"op": "part", "answers": "00000007", "id": 1, "at": 0, "data": ""}',
        b'{"op": "part", "answers": "../000007", "id": 1, "at": 0, "data": ""}',
        b'{"op": "part", "answers": "000000007\\n", "id": 1, "at": 0, "data": ""}',
        b'{"op": "part", "answers": "000000007", "id": 1, "at": -1, "data": ""}',
        b'{"op": "part", "answers": "000000007", "id": 1, "at": 99999999999, "data": ""}',
        b'{"op": "part", "answers": "000000007", "id": 1, "at": 0, "data": "?"}',
        b'{"op": "part", "answers": "000000007", "id": 36893488147419103232, "at": 0, "data": ""}',
        b'{"op": "call", "answers": "000000007", "id": 1, "method": "x", "size": 0, "crc": 0}',
    ],
)
def test_lines_that_make_no_sense_are_one_error(line: bytes) -> None:
    with pytest.raises(ConfigError):
        decode_line(line)


def call(method: str, **fields: int) -> RequestEnd:
    return RequestEnd(TOKEN, 1, method, 0, 0, b"", **fields)


@given(st.sampled_from([JOB_PUBLISH.name, JOB_EPOCH.name]), st.binary())
def test_any_bytes_are_a_request_or_one_error(method: str, encoded: bytes) -> None:
    with pytest.raises(CachefsError):
        translate_call(call(method), encoded, {"tree": "00"})


def test_only_what_concerns_jobs_and_this_mount_may_be_called() -> None:
    publish = JobPublication(job="j", dataset="tree", snapshot="00", source="x" * 300)
    said = translate_call(call(JOB_PUBLISH.name), encode(publish), {"tree": "00"})
    assert isinstance(said.request, JobPublication)
    assert said.request.source == ("control file: " + "x" * 300)[:256]
    with pytest.raises(ConfigError, match="no call 'DatasetRemove'"):
        translate_call(call(DATASET_REMOVE.name), b"", {})
    for other in (msgspec.structs.replace(publish, snapshot="01"), msgspec.structs.replace(publish, dataset="no")):
        with pytest.raises(NotFound, match="does not show"):
            translate_call(call(JOB_PUBLISH.name), encode(other), {"tree": "00"})
    long = JobEpoch(job="j" * 129, consumer="0", epoch=0, order=b"")
    with pytest.raises(ConfigError, match="names have at most"):
        translate_call(call(JOB_EPOCH.name), encode(long), {})
    with pytest.raises(ConfigError, match="newer cachefs"):
        IncompleteRequests().complete_request(call(JOB_EPOCH.name, version=VERSION + 1), 0)


@given(st.text(), st.integers(0, (1 << 53) - 1))
def test_every_error_can_be_answered_in_a_line(text: str, number: int) -> None:
    line = msgspec.json.encode(make_error_response(number, NotFound(text + "\ud800" * 600)))
    assert len(line) < MAX_LINE_BYTES
    assert msgspec.json.decode(line, type=CallResponse).error == "NotFound"


@given(st.integers(0, (1 << 36) - 1))
def test_the_name_says_the_token(number: int) -> None:
    assert parse_fifo_token(response_fifo_name(format_token(number)).encode()) == number
    assert parse_fifo_token(response_fifo_name(format_token(number)).encode() + b"0") is None
