"""Records are found where the programs that write such files put them, and by reading little."""

import gzip
import io
import struct
import tarfile
from typing import Any

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachefs import records as module
from cachefs.errors import ConfigError
from cachefs.records import HEADER_READ_BYTES, READAHEAD_BYTES, index_records, masked_crc32c


class File:
    """A file in memory that counts how often and how much of it is read."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.requests = 0
        self.bytes = 0

    def read(self, offset: int, length: int) -> bytes:
        assert 0 <= offset < len(self.data)
        assert 0 < length <= len(self.data) - offset
        self.requests += 1
        self.bytes += length
        return self.data[offset : offset + length]


def records(kind: str, data: bytes) -> list[bytes]:
    offsets, lengths = index_records(kind, File(data).read, len(data))
    assert offsets.dtype == lengths.dtype == numpy.uint64
    return [data[offset : offset + length] for offset, length in zip(offsets.tolist(), lengths.tolist(), strict=True)]


def complaint(kind: str, data: bytes) -> str:
    with pytest.raises(ConfigError) as refused:
        index_records(kind, File(data).read, len(data))
    assert "\n" not in str(refused.value)
    return str(refused.value)


# --- npy ---


def saved(array: Any, version: tuple[int, int] | None = None) -> bytes:
    file = io.BytesIO()
    numpy.lib.format.write_array(file, numpy.asarray(array), version)
    return file.getvalue()


def header(shape: str, descr: str = "'<f8'") -> bytes:
    text = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}}}".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text


DTYPES = ["u1", "<i2", ">i4", "<f8", "?", "S5", "<U3", "<M8[s]", [("a", "<i4"), ("b", "u1", (2, 3))]]


@given(
    st.sampled_from(DTYPES),
    st.tuples(st.integers(0, 5)) | st.tuples(st.integers(0, 5), st.integers(1, 5), st.integers(1, 3)),
    st.sampled_from([None, (1, 0), (2, 0), (3, 0)]),
)
def test_npy_rows(dtype: Any, shape: tuple[int, ...], version: tuple[int, int] | None) -> None:
    count = int(numpy.prod(shape))
    itemsize = numpy.dtype(dtype).itemsize
    noise = numpy.random.default_rng(count).integers(0, 2, count * itemsize, dtype=numpy.uint8).tobytes()
    array = numpy.frombuffer(noise, dtype=dtype, count=count).reshape(shape)
    assert records("npy", saved(array, version)) == [array[row : row + 1].tobytes() for row in range(len(array))]


def test_npy_with_a_field_name_that_is_not_ascii() -> None:
    array = numpy.zeros(3, dtype=[("größe", "<i4"), ("字", "<i2")])
    assert records("npy", saved(array, (3, 0))) == [bytes(6)] * 3


def test_npy_without_rows() -> None:
    assert records("npy", header(f"(0, {2**62}, {2**62})")) == []


def test_npy_costs_one_small_read() -> None:
    file = File(saved(numpy.zeros((1000, 1000), dtype="f4")))
    offsets, lengths = index_records("npy", file.read, len(file.data))
    assert (file.requests, file.bytes) == (1, HEADER_READ_BYTES)
    assert (len(offsets), int(lengths[0]), int(offsets[-1])) == (1000, 4000, len(file.data) - 4000)


def test_npy_of_more_than_4_gib() -> None:
    start = header("(9000, 1048576)", "'u1'")
    size = len(start) + 9000 * (1 << 20)
    offsets, _ = index_records("npy", lambda offset, length: start[offset : offset + length].ljust(length, b"\0"), size)
    assert int(offsets[-1]) == size - (1 << 20)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "not an npy file"),
        (b"PK\x03\x04" + bytes(100), "not an npy file"),
        (b"\x93NUMPY\x01\x00", "cut off"),
        (b"\x93NUMPY\x04\x00" + bytes(100), "newer"),
        (b"\x93NUMPY\x02\x00" + b"\xff" * 100, "are not accepted"),
        (b"\x93NUMPY\x01\x00\x40\x00" + b"(" * 64, "damaged"),
        (header("[5]") + bytes(40), "damaged"),
        (header("5") + bytes(40), "damaged"),
        (header("(-5,)") + bytes(40), "damaged"),
        (header("(5.0,)") + bytes(40), "damaged"),
        (header("(5,)", "'<q9'") + bytes(40), "damaged"),
        (header("(5,)", "None if 0 else '<f8'") + bytes(40), "damaged"),
        (header("(5,), 'shape") + bytes(40), "damaged"),
        (header("(5,)").replace(b"'descr'", b"'DESCR'") + bytes(40), "damaged"),
        (header("(5,)").replace(b"{", b"[").replace(b"}", b"]") + bytes(40), "damaged"),
        (header(f"({2**62}, 0)"), "are empty"),
        (header(f"({2**62},)"), "cut off"),
        (saved(numpy.zeros(5))[:-1], "cut off"),
        (saved(5.0), "no rows"),
        (saved(numpy.array([None, 3])), "pickled"),
        (saved(numpy.asfortranarray(numpy.ones((2, 3)))), "ascontiguousarray"),
    ],
)
def test_npy_files_that_cannot_be_indexed(data: bytes, said: str) -> None:
    assert said in complaint("npy", data)


# --- tar ---

NAMES = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=40).map(
    lambda name: name.strip("/.") or "a"
)
KINDS = [tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, b"V"]


@st.composite
def members(draw: st.DrawFn) -> list[tuple[tarfile.TarInfo, bytes]]:
    drawn = []
    for _ in range(draw(st.integers(1, 8))):
        info = tarfile.TarInfo(draw(NAMES) * draw(st.sampled_from([1, 1, 30])))
        info.type = draw(st.sampled_from(KINDS))
        if info.type == tarfile.AREGTYPE and len(info.name) > 30:
            # Nobody writes the old type and a long name. Where that is cut behind a slash, tarfile takes it for a
            # directory.
            info.type = tarfile.REGTYPE
        info.linkname = "elsewhere" * draw(st.sampled_from([1, 20])) if info.type in tarfile.SYMTYPE + b"1" else ""
        info.mtime = draw(st.sampled_from([0, 1_700_000_000, 1.5]))
        data = draw(st.binary(max_size=2000)) if info.isreg() or info.type == b"V" else b""
        info.size = len(data)
        drawn.append((info, data))
    return drawn


def packed(contents: list[tuple[tarfile.TarInfo, bytes]], tar_format: int) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tar_format, pax_headers={"comment": "of all"}) as archive:
        for info, data in contents:
            if info.type == b"V":  # tarfile writes the data of files only
                file.write(info.tobuf(tar_format) + data.ljust(-(-len(data) // 512) * 512, b"\0"))
                archive.offset = file.tell()
            else:
                archive.addfile(info, io.BytesIO(data))
    return file.getvalue()


def regular_file(name: str, data: bytes) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    return info, data


@given(members(), st.sampled_from([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]))
def test_tar_members(contents: list[tuple[tarfile.TarInfo, bytes]], tar_format: int) -> None:
    data = packed(contents, tar_format)
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        theirs = [(member.offset_data, member.size) for member in archive if member.isreg()]
    offsets, lengths = index_records("tar", File(data).read, len(data))
    assert list(zip(offsets.tolist(), lengths.tolist(), strict=True)) == theirs
    assert records("tar", data) == [content for info, content in contents if info.isreg()]


def test_tar_in_ustar_format_and_with_old_directories() -> None:
    old = tarfile.TarInfo("directory/")
    old.type = tarfile.AREGTYPE
    data = packed([(old, b""), regular_file("a" * 99 + "/" + "b" * 90, b"x" * 700)], tarfile.USTAR_FORMAT)
    assert records("tar", data) == [b"x" * 700]


@pytest.mark.parametrize("tar_format", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_tar_member_of_more_than_8_gib(tar_format: int) -> None:
    """Its size does not fit the header's octal digits."""
    info = tarfile.TarInfo("large")
    info.size = 9 << 30
    header = info.tobuf(tar_format)
    small = packed([regular_file("small", b"end")], tar_format)
    parts = {0: header, len(header) + info.size: small}
    size = len(header) + info.size + len(small)

    def read(offset: int, length: int) -> bytes:
        start = max(start for start in parts if start <= offset)
        return parts[start][offset - start : offset - start + length].ljust(length, b"\0")

    offsets, lengths = index_records("tar", read, size)
    assert lengths.tolist() == [9 << 30, 3]
    assert int(offsets[1]) == size - len(small) + (small.index(b"end"))


def test_tar_of_large_members_is_not_read_whole() -> None:
    file = File(packed([regular_file(f"{number}.jpg", bytes(300_000)) for number in range(20)], tarfile.GNU_FORMAT))
    index_records("tar", file.read, len(file.data))
    assert file.requests <= 21
    assert file.bytes <= 21 * HEADER_READ_BYTES


def test_tar_of_small_members_takes_few_requests() -> None:
    file = File(packed([regular_file(f"{number}.cls", b"1") for number in range(2000)], tarfile.PAX_FORMAT))
    index_records("tar", file.read, len(file.data))
    assert file.requests <= 2 + len(file.data) // READAHEAD_BYTES
    assert file.bytes <= len(file.data)


TWO = packed([regular_file("one", b"1" * 600), regular_file("two", b"2" * 600)], tarfile.GNU_FORMAT)
PAX = packed([regular_file("long" * 50, b"1" * 600)], tarfile.PAX_FORMAT)[1024:]  # without the global header


def test_tar_without_an_end_mark_or_members() -> None:
    assert records("tar", TWO[: 2 * 1536]) == [b"1" * 600, b"2" * 600]
    assert records("tar", TWO[: 1536 + 512 + 600]) == [b"1" * 600, b"2" * 600]
    assert records("tar", packed([], tarfile.GNU_FORMAT)) == []


def test_sparse_tar_members_are_refused() -> None:
    info, _ = regular_file("sparse", b"")
    info.type = tarfile.GNUTYPE_SPARSE
    assert "sparse" in complaint("tar", info.tobuf(tarfile.GNU_FORMAT) + bytes(1024))
    info, _ = regular_file("sparse", b"")
    info.pax_headers = {"GNU.sparse.major": "1"}
    assert "sparse" in complaint("tar", info.tobuf(tarfile.PAX_FORMAT) + bytes(1024))


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "no header"),
        (b"x", "not an uncompressed tar"),
        (gzip.compress(TWO, mtime=0), "not an uncompressed tar"),
        (TWO[:1536] + b"\1" + TWO[1537:], "damaged at byte 1536"),
        (TWO[:1700], "damaged at byte 1536"),
        (TWO[: 1536 + 512 + 599], "cut off in the member at byte 1536"),
        (PAX.replace(b"path=", b"path:"), "extended header at byte 0"),
        (PAX.replace(b"210 path", b"999 path"), "extended header at byte 0"),
        (PAX.replace(b"210 path", b"-10 path"), "extended header at byte 0"),
        (PAX.replace(b"210 path", b"4 path=\n"), "extended header at byte 0"),
        (tarfile.TarInfo.create_pax_global_header({"size": "5"}) + TWO, "global size"),
    ],
)
def test_tar_archives_that_cannot_be_indexed(data: bytes, said: str) -> None:
    assert said in complaint("tar", data)


@given(st.integers(0, len(TWO) - 1), st.integers(1, 255))
def test_damage_to_a_tar_archive_never_shifts_records(position: int, flip: int) -> None:
    damaged = bytearray(TWO)
    damaged[position] ^= flip
    try:
        offsets, lengths = index_records("tar", File(bytes(damaged)).read, len(damaged))
    except ConfigError:
        return
    assert (offsets.tolist(), lengths.tolist()) == ([512, 2048], [600, 600])


# --- TFRecord ---


def checksum(data: bytes) -> bytes:
    """Bit by bit, after record_writer.h and crc32c.h of TensorFlow."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF)


def framed(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + checksum(length) + data + checksum(data)


def test_checksum_is_tensorflows() -> None:
    # How each TensorBoard event file begins: a record of 24 bytes.
    assert struct.pack("<Q", 24) + checksum(struct.pack("<Q", 24)) == b"\x18\0\0\0\0\0\0\0\xa3\x7fK\x22"


@given(st.integers(1, 20), st.integers(0, 20))
def test_checksums_of_many_rows(width: int, height: int) -> None:
    rows = numpy.random.default_rng(width).integers(0, 256, (height, width), dtype=numpy.uint8)
    assert masked_crc32c(rows).astype("<u4").tobytes() == b"".join(checksum(row.tobytes()) for row in rows)


@given(st.lists(st.binary(max_size=300), max_size=30))
def test_tfrecords(contents: list[bytes]) -> None:
    frames = [framed(data) for data in contents]
    assert records("tfrecord", b"".join(frames)) == frames


def test_many_and_large_tfrecords() -> None:
    frames = [framed(b"small")] * 9000 + [framed(bytes(200_000))] * 3
    file = File(b"".join(frames))
    offsets, lengths = index_records("tfrecord", file.read, len(file.data))
    assert lengths.tolist() == [len(frame) for frame in frames]
    assert int(offsets[-1] + lengths[-1]) == len(file.data)
    assert file.bytes <= 9000 * len(frames[0]) + READAHEAD_BYTES + 3 * READAHEAD_BYTES
    assert file.requests <= 2 + 9000 * len(frames[0]) // READAHEAD_BYTES + 3


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"x" * 5, "cut off in the record at byte 0"),
        (gzip.compress(framed(b"data"), mtime=0), "not an uncompressed TFRecord file"),
        (framed(b"data") + b"\1" + framed(b"data"), "at byte 20"),
        ((framed(b"data") * 5000)[:-1], "cut off in the record at byte 99980"),
        (framed(b"data") + framed(b"data")[:7], "cut off in the record at byte 20"),
        (framed(b"data") + bytes(12), "at byte 20"),
        (framed(b"data") * 4095 + b"\1" + framed(b"data")[1:] + framed(b"data") * 5, "at byte 81900"),
        (framed(b"data") * 4096 + b"\1" + framed(b"data")[1:], "at byte 81920"),
    ],
)
def test_tfrecord_files_that_cannot_be_indexed(data: bytes, said: str) -> None:
    assert said in complaint("tfrecord", data)


def test_zeros_are_not_scanned_as_tfrecords_to_their_end() -> None:
    file = File(framed(b"data") + bytes(10 << 20))
    with pytest.raises(ConfigError, match="at byte 20"):
        index_records("tfrecord", file.read, len(file.data))
    assert file.bytes < 1 << 20


# --- the rest ---


@given(st.integers(0, 300), st.integers(1, 40))
def test_fixed_size_records(count: int, length: int) -> None:
    data = numpy.random.default_rng(count).bytes(count * length)
    assert records(f"fixed:{length}", data) == [data[at : at + length] for at in range(0, len(data), length)]


def test_fixed_size_records_are_not_read() -> None:
    file = File(bytes(100))
    index_records("fixed:10", file.read, 100)
    assert file.requests == 0


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("fixed:7", "not a whole number"),
        ("fixed:0", "fixed:3073"),
        ("fixed:", "fixed:3073"),
        ("fixed:-5", "fixed:3073"),
        ("fixed:²", "fixed:3073"),
        ("zip", "known: npy, tar"),
    ],
)
def test_formats_that_make_no_sense(kind: str, said: str) -> None:
    assert said in complaint(kind, bytes(100))


@pytest.mark.parametrize("kind", ["npy", "tar", "tfrecord"])
def test_file_that_is_shorter_than_listed(kind: str) -> None:
    data = {"npy": saved(numpy.zeros(9)), "tar": TWO, "tfrecord": framed(b"data")}[kind]
    with pytest.raises(ConfigError, match="refresh the dataset"):
        index_records(kind, lambda offset, length: data[offset : min(offset + length, 10)], len(data))


# --- anything at all ---


def pax(text: bytes, kind: bytes = b"x", size: bytes = b"") -> bytes:
    """A tar header of that kind with that text as its data."""
    head = bytearray(512)
    head[:5] = b"a.bin"
    head[124:136] = (size or b"%011o" % len(text)).ljust(12, b"\0")
    head[156:157] = kind
    head[257:265] = b"ustar\00000"
    head[148:156] = b" " * 8
    head[148:156] = b"%06o\0 " % sum(head)
    return bytes(head) + text + bytes(-len(text) % 512)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (pax(b"0 a=b\n\n\n") + bytes(1024), "a damaged or too long extended header at byte 0"),
        (pax(b"1 a=b\n") + bytes(1024), "a damaged or too long extended header at byte 0"),
        (pax(b"", b"0", b"-0000001000") + bytes(1024), "damaged at byte 0"),
    ],
)
def test_lengths_that_lead_nowhere(data: bytes, said: str) -> None:
    assert said in complaint("tar", data)


@pytest.mark.parametrize("descr", ["()", "('f4',)", "[()]", "('V', -1)", "{'a': 1}", "'<U99999999999'", "[[]]", "9"])
def test_npy_types_that_make_no_sense(descr: str) -> None:
    assert complaint("npy", header("(3,)", descr) + bytes(100)) in (
        "the npy header is damaged",
        "the rows of the npy array are empty",
    )


def test_a_long_extended_header_is_read_in_one_go() -> None:
    """200,000 records in 1 MiB: with a copy of the rest for each, that took seconds."""
    text = b"5 a=\n" * 200_000
    archive = pax(text) + pax(b"data", b"0") + bytes(1024)
    assert records("tar", archive) == [b"data"]


def test_more_records_than_a_map_may_have_are_not_written_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """8 GB of two bytes each took 64 GB of memory."""

    def refused(*given: Any) -> bytes:
        raise AssertionError("nothing is to be read")

    with pytest.raises(ConfigError, match="4,000,000,000 records are more than"):
        index_records("fixed:2", refused, 8_000_000_000)
    monkeypatch.setattr(module, "MAX_RECORDS", 3)
    assert "4 records are more than" in complaint("npy", saved(numpy.zeros((4, 1))))
    assert "4 records are more than" in complaint("tar", pax(b"x", b"0") * 4)


FRAGMENTS = st.one_of(
    st.binary(max_size=600),
    st.builds(
        pax,
        st.binary(max_size=80) | st.from_regex(rb"([0-9]{0,3} [a-zA-Z.]{0,9}=[0-9]{0,3}\n){0,4}", fullmatch=True),
        st.sampled_from([b"x", b"g", b"0", b"\0", b"5", b"L", b"S", b"X"]),
        st.binary(max_size=12) | st.from_regex(rb"-?[0-7]{1,11}", fullmatch=True),
    ),
    st.builds(header, st.text("0123456789,()- ", max_size=12), st.text("'<f48()[],Vi|O{}:-", max_size=12)),
    st.just(bytes(512)),
)


@given(st.sampled_from(["npy", "tar", "tfrecord", "fixed:7"]), st.lists(FRAGMENTS, max_size=6).map(b"".join))
def test_whatever_a_file_holds_it_is_refused_or_its_records_are_in_it(kind: str, data: bytes) -> None:
    file, looks = File(data), 0
    at = module._FileWindow.read_at

    def counted(window: module._FileWindow, offset: int, length: int) -> bytes:
        nonlocal looks
        looks += 1
        return at(window, offset, length)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module._FileWindow, "read_at", counted)
        try:
            offsets, lengths = index_records(kind, file.read, len(data))
        except ConfigError:
            pass
        else:
            ends = [begin + length for begin, length in zip(offsets.tolist(), lengths.tolist(), strict=True)]
            assert all(end <= len(data) for end in ends)
    assert looks <= 2 + len(data) // 16
