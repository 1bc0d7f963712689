"""Finds the records of an array-like file by reading as little of the file as possible."""

import ast
import functools
import struct
from array import array
from collections.abc import Callable
from typing import Final

import numpy
from numpy.typing import NDArray

from cachefs.errors import ConfigError

# Function (offset, length) -> bytes; fewer only at the end of the file.
ReadRange = Callable[[int, int], bytes]
Offsets = NDArray[numpy.uint64]
# Offset and length of each record in bytes: two arrays of shape (records,), in file order.
RecordExtents = tuple[Offsets, Offsets]

INDEXERS = ("npy", "tar", "tfrecord", "fixed:<bytes>")
_FIXED: Final = "fixed:"
_MAX_DIGITS: Final = 20  # digits

# Minimum bytes of a sequential read: an object store takes less than 1 ms for 64 KiB, and 20 ms for a request.
READAHEAD_BYTES = 64 << 10
# Maximum number of records of one file, or of all files of a map: their extents take 16 bytes each.
MAX_RECORDS: Final = 1 << 26

# Bytes read after a longer skip: enough for a tar header with the extended headers before it.
HEADER_READ_BYTES = 4 << 10


def index_records(kind: str, read: ReadRange, size: int) -> RecordExtents:
    """Return the extents of the records of a file of *size* bytes: their offsets and lengths in bytes, in file order,
    each an array of shape (records,) and dtype uint64.

    - `npy`: the rows (items along the first axis) of the array in a file of numpy.save.
    - `tar`: the data of the regular files of an uncompressed archive (ustar, GNU or pax).
    - `tfrecord`: the records with their frame (length, data and both checksums), as in NVIDIA DALI's index files. The
      checksums of the lengths are verified; the data is not read, so its checksums are not.
    - `fixed:<bytes>`: records of this number of bytes from the start of the file to its end.

    The work is bounded by the file's size, whatever its content. Raises ConfigError, without the name of the file, also
    for more than MAX_RECORDS records.
    """
    check_record_format(kind)
    file = _FileWindow(read, size)
    if kind == "npy":
        return _index_npy(file)
    if kind == "tar":
        return _index_tar(file)
    if kind == "tfrecord":
        return _index_tfrecord(file)
    return _index_fixed(int(kind.removeprefix(_FIXED)), size)


def check_record_format(kind: str) -> None:
    """Raises ConfigError where records of this kind cannot be found."""
    if kind in INDEXERS[:-1]:
        return
    if not kind.startswith(_FIXED):
        raise ConfigError(f"unknown record format {kind!r:.80}; known: {', '.join(INDEXERS)}")
    digits = kind.removeprefix(_FIXED)
    if not (digits.isascii() and digits.isdecimal() and len(digits) < _MAX_DIGITS and 0 < int(digits) < 2**63):
        raise ConfigError(
            f"record format {kind!r:.80}: expected a number of bytes from 1 to {2**63 - 1}, such as fixed:3073"
        )


class _FileWindow:
    """Keeps one range of a file in memory. Sequential reads request READAHEAD_BYTES bytes at once."""

    def __init__(self, read: ReadRange, size: int) -> None:
        self.size = size
        self._read = read
        self._start = 0  # of the range in memory
        self._data = b""

    def read_at(self, offset: int, length: int) -> bytes:
        """Return the bytes at *offset*; fewer at the end of the file. Raises ConfigError if it ends before *size*."""
        length = min(length, self.size - offset)
        if length <= 0:
            return b""
        skipped = offset - self._start
        if not 0 <= skipped <= len(self._data) - length:
            near = bool(self._data) and 0 <= skipped <= len(self._data) + READAHEAD_BYTES
            wanted = min(max(length, READAHEAD_BYTES if near else HEADER_READ_BYTES), self.size - offset)
            self._start, self._data, skipped = offset, self._read(offset, wanted), 0
            if len(self._data) < wanted:
                raise ConfigError(
                    f"the file ends at byte {offset + len(self._data)}, not {self.size}; refresh the dataset"
                )
        return self._data[skipped : skipped + length]


def check_record_count(records: int) -> None:
    """Raises ConfigError for more than MAX_RECORDS records."""
    if records > MAX_RECORDS:
        raise ConfigError(f"{records:,} records are more than the {MAX_RECORDS:,} that one sample map may have")


def _even_extents(start: int, length: int, count: int) -> RecordExtents:
    check_record_count(count)
    offsets = numpy.uint64(start) + numpy.arange(count, dtype=numpy.uint64) * numpy.uint64(length)
    return offsets, numpy.full(count, length, dtype=numpy.uint64)


def _index_fixed(bytes_per_record: int, size: int) -> RecordExtents:
    count, remainder = divmod(size, bytes_per_record)
    if remainder:
        raise ConfigError(f"{size} bytes are not a whole number of records of {bytes_per_record} bytes")
    return _even_extents(0, bytes_per_record, count)


# --- npy (numpy.lib.format) ---

# Version of the format -> size of the field with the header's length, in bytes.
_NPY_LENGTH_SIZE = {(1, 0): 2, (2, 0): 4, (3, 0): 4}
# numpy itself loads no longer headers from files that it does not trust.
_NPY_MAX_HEADER = 10_000


def _index_npy(file: _FileWindow) -> RecordExtents:
    start = file.read_at(0, 12)
    if start[:6] != b"\x93NUMPY":
        raise ConfigError("this is not an npy file (numpy.save); its first bytes are not \\x93NUMPY")
    length_size = _NPY_LENGTH_SIZE.get((start[6], start[7])) if len(start) == 12 else None
    if length_size is None:
        raise ConfigError("this npy file is cut off, or newer than format version 3.0")
    header_length = int.from_bytes(start[8 : 8 + length_size], "little")
    if header_length > _NPY_MAX_HEADER:
        raise ConfigError(f"the npy header is {header_length} bytes long; more than {_NPY_MAX_HEADER} are not accepted")
    data = 8 + length_size + header_length
    rows, row_bytes = _parse_npy_header(file.read_at(8 + length_size, header_length))
    if data + rows * row_bytes > file.size:
        raise ConfigError(
            f"the npy file is cut off: its array needs {data + rows * row_bytes} bytes, it has {file.size}"
        )
    return _even_extents(data, row_bytes if rows else 0, rows)


def _parse_npy_header(header: bytes) -> tuple[int, int]:
    """Return (number of rows, bytes per row)."""
    try:
        described = ast.literal_eval(header.decode("utf-8" if not header.isascii() else "ascii"))
        shape: tuple[int, ...] = described["shape"]
        dtype = numpy.dtype(numpy.lib.format.descr_to_dtype(described["descr"]))
        fortran_order = bool(described["fortran_order"])
        makes_sense = type(shape) is tuple and all(type(length) is int and 0 <= length < 2**63 for length in shape)
    except (ValueError, SyntaxError, TypeError, LookupError, ArithmeticError, MemoryError, RecursionError):
        raise ConfigError("the npy header is damaged") from None
    if not makes_sense:
        raise ConfigError("the npy header is damaged")
    if not shape:
        raise ConfigError("the npy file holds a single number, which has no rows")
    if dtype.hasobject:
        raise ConfigError("the npy file holds pickled objects, which cannot be found without reading them all")
    if fortran_order and len(shape) > 1:
        raise ConfigError(
            "the npy array is in Fortran order, so its rows are scattered; save numpy.ascontiguousarray of it"
        )
    row_bytes = dtype.itemsize
    for length in shape[1:]:
        row_bytes *= length
    if row_bytes == 0:
        raise ConfigError("the rows of the npy array are empty")
    return shape[0], row_bytes


# --- tar (POSIX pax, "ustar interchange format"; GNU tar manual, "basic tar format") ---

_TAR_BLOCK = 512
_TAR_FILE = (b"0", b"\0", b"7")
# Links, devices and directories have no data, whatever their size field says.
_TAR_WITHOUT_DATA = (b"1", b"2", b"3", b"4", b"5", b"6")
_TAR_EXTENDED, _TAR_GLOBAL, _TAR_SPARSE = (b"x", b"X"), b"g", b"S"
# A longer extended header (names, attributes) is damage or an attack.
_TAR_MAX_EXTENDED = 1 << 20


def _index_tar(file: _FileWindow) -> RecordExtents:
    offsets, lengths = array("Q"), array("Q")
    position = 0
    extended: dict[bytes, bytes] = {}
    while any(header := file.read_at(position, _TAR_BLOCK)):
        size = _parse_tar_size(header, position)
        data = position + _TAR_BLOCK
        kind = header[156:157]
        if kind in _TAR_EXTENDED or kind == _TAR_GLOBAL:
            _add_pax_records(extended, kind, file.read_at(data, min(size, _TAR_MAX_EXTENDED)), position)
        elif kind not in (b"L", b"K"):  # GNU's long names, of the member that follows
            if kind == _TAR_SPARSE or any(key.startswith(b"GNU.sparse.") for key in extended):
                raise ConfigError(f"the tar member at byte {position} is sparse; pack it without --sparse")
            size = _parse_number(extended.get(b"size"), size, position)
            extended.clear()
            if kind in _TAR_FILE and not _is_old_directory(kind, header):
                offsets.append(data)
                lengths.append(size)
                check_record_count(len(offsets))
            elif kind in _TAR_WITHOUT_DATA:
                size = 0
        if data + size > file.size:
            raise ConfigError(f"the tar archive is cut off in the member at byte {position}")
        position = data + -(-size // _TAR_BLOCK) * _TAR_BLOCK
    if position == 0 and file.size < _TAR_BLOCK:
        raise ConfigError("this is not a tar archive; it has no header")
    return numpy.array(offsets, dtype=numpy.uint64), numpy.array(lengths, dtype=numpy.uint64)


def _parse_tar_size(header: bytes, position: int) -> int:
    """Return the size field of a header whose checksum is right. The checksum counts its own field as spaces."""
    try:
        if (
            len(header) == _TAR_BLOCK
            and int(header[148:156].strip(b" \0"), 8) == sum(header) - sum(header[148:156]) + 256
        ):
            if header[124] == 0x80:  # GNU writes a binary number where octal digits do not suffice
                return int.from_bytes(header[125:136], "big")
            size = int(header[124:136].strip(b" \0") or b"0", 8)
            if size >= 0:
                return size
    except ValueError:
        pass
    raise ConfigError(f"this is not an uncompressed tar archive, or it is damaged at byte {position}")


def _is_old_directory(kind: bytes, header: bytes) -> bool:
    return kind == b"\0" and header[:100].rstrip(b"\0").endswith(b"/")


def _add_pax_records(extended: dict[bytes, bytes], kind: bytes, records: bytes, position: int) -> None:
    """Add the records of a pax header to *extended*. Each is `<its length> <key>=<value>\\n`."""
    at, end = 0, len(records.rstrip(b"\0"))
    while at < end:
        blank = records.find(b" ", at, at + _MAX_DIGITS)
        digits = records[at:blank] if blank >= 0 else b""
        length = _parse_number(digits, 0, position)
        key, equals, value = records[blank + 1 : at + length].partition(b"=")
        # A length smaller than its own digits would make this loop endless.
        if not len(digits) < length <= len(records) - at or not equals or not value.endswith(b"\n"):
            raise ConfigError(f"the tar archive has a damaged or too long extended header at byte {position}")
        if kind == _TAR_GLOBAL and key == b"size":
            raise ConfigError(f"the tar archive has a global size at byte {position}; pack it with another tar")
        if kind != _TAR_GLOBAL:
            extended[key] = value[:-1]
        at += length


def _parse_number(digits: bytes | None, otherwise: int, position: int) -> int:
    if digits is None:
        return otherwise
    if not (digits.isdigit() and len(digits) < _MAX_DIGITS):
        raise ConfigError(f"the tar archive has a damaged extended header at byte {position}")
    return int(digits)


# --- TFRecord (tensorflow/core/lib/io/record_writer.h) ---

_TFRECORD_HEADER = struct.Struct("<QI")  # length of the data, its masked CRC-32C
_TFRECORD_FRAME = _TFRECORD_HEADER.size + 4
# Number of headers whose checksums are verified at once. Single checks would take longer than the scan; a check only at
# the end would scan a hole of zeros to its end.
_TFRECORD_CHECKED_AT_ONCE = 4096


def _index_tfrecord(file: _FileWindow) -> RecordExtents:
    offsets = [0]
    headers = bytearray()
    at, size, unpack = file.read_at, file.size, _TFRECORD_HEADER.unpack
    while offsets[-1] < size:
        header = at(offsets[-1], _TFRECORD_HEADER.size)
        if len(header) < _TFRECORD_HEADER.size:
            break
        headers += header
        offsets.append(offsets[-1] + unpack(header)[0] + _TFRECORD_FRAME)
        if len(headers) == _TFRECORD_CHECKED_AT_ONCE * _TFRECORD_HEADER.size:
            _verify_lengths(bytes(headers), offsets)
            headers.clear()
            check_record_count(len(offsets))
    _verify_lengths(bytes(headers), offsets)
    if offsets[-1] != size:
        last = next(offset for offset in reversed(offsets) if offset < size)
        raise ConfigError(f"the TFRecord file is cut off in the record at byte {last}")
    edges = numpy.array(offsets, dtype=numpy.uint64)
    return edges[:-1], numpy.diff(edges)


def _verify_lengths(headers: bytes, offsets: list[int]) -> None:
    """Verify the headers of the last records of *offsets*. Reports the first wrong one: the next are wrong too."""
    fields = numpy.frombuffer(headers, dtype=[("length", numpy.uint8, 8), ("crc", "<u4")])
    wrong = numpy.flatnonzero(masked_crc32c(fields["length"]) != fields["crc"])
    if len(wrong):
        offset = offsets[wrong[0] - len(fields) - 1]
        raise ConfigError(f"this is not an uncompressed TFRecord file, or the length at byte {offset} is damaged")


@functools.cache
def _crc32c_table() -> NDArray[numpy.uint32]:
    table = numpy.arange(256, dtype=numpy.uint32)
    for _ in range(8):
        table = (table >> numpy.uint32(1)) ^ (table & numpy.uint32(1)) * numpy.uint32(0x82F63B78)
    return table


def masked_crc32c(rows: NDArray[numpy.uint8]) -> NDArray[numpy.uint32]:
    """Return TFRecord's checksum of each row of an array of shape (n, bytes): shape (n,), uint32."""
    table = _crc32c_table()
    crc = numpy.full(len(rows), 0xFFFFFFFF, dtype=numpy.uint32)
    for column in rows.T:
        crc = table[(crc ^ column) & numpy.uint32(0xFF)] ^ (crc >> numpy.uint32(8))
    crc = ~crc
    return ((crc >> numpy.uint32(15)) | (crc << numpy.uint32(17))) + numpy.uint32(0xA282EAD8)
