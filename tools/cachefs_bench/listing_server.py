"""An S3 server that only lists: a bucket of any number of keys, with the responses and the delay of a real server.

There are no objects behind the keys: filling a real server with a million takes half an hour, and then the server would
be the bottleneck. `main` takes LAYOUT, KEYS and DELAY from the command line, and prints its URL.
"""

import asyncio
import sys
from bisect import bisect_left, bisect_right
from enum import StrEnum
from typing import Final
from urllib.parse import parse_qs, quote, urlsplit
from xml.sax.saxutils import escape

BUCKET: Final = "cachefs-bench"
_PAGE: Final = 1000
_ETAG: Final = "&quot;d41d8cd98f00b204e9800998ecf8427e&quot;"
_SIZE: Final = 112_640


class Layout(StrEnum):
    """The shape of the keys."""

    TREE = "tree"  # a thousand directories of equal size
    FLAT = "flat"  # no directories
    DEEP = "deep"  # all in one deep directory
    SKEWED = "skewed"  # one directory has nine tenths


def keys(layout: Layout, count: int) -> list[str]:
    """Return all keys, in order."""
    match layout:
        case Layout.TREE:
            each = -(-count // 1000)
            found = [f"train/n{number // each:08}/n{number // each:08}_{number:08}.JPEG" for number in range(count)]
        case Layout.FLAT:
            found = [f"{number:08}.jpg" for number in range(count)]
        case Layout.DEEP:
            found = [f"projects/vision/data/2026/raw/images/part/{number:08}.jpg" for number in range(count)]
        case Layout.SKEWED:
            found = [
                f"large/{number:08}.jpg" if number % 10 else f"small{number // 10 % 100:02}/{number:08}.jpg"
                for number in range(count)
            ]
    return sorted(found)


class ListingServer:
    """Answers both versions of ListObjects, for a bucket with these keys."""

    def __init__(self, found: list[str], delay: float) -> None:
        """delay: seconds that each response takes."""
        self._keys = found
        self._delay = delay
        self.requests = 0

    async def serve_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection."""
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                method, target, _ = head.split(b" ", 2)
                self.requests += 1
                if self._delay:
                    await asyncio.sleep(self._delay)
                body = self.response_body(target.decode()) if method == b"GET" else b""
                if body is None:
                    await reader.read()  # until the client disconnects
                    return
                writer.write(
                    b"HTTP/1.1 200 OK\r\nContent-Type: application/xml\r\nContent-Length: %d\r\n\r\n%b"
                    % (len(body), body)
                )
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    def response_body(self, target: str) -> bytes | None:
        """Return the body of a response; None for a request that stays unanswered."""
        query = {name: values[0] for name, values in parse_qs(urlsplit(target).query).items()}
        if "location" in target:
            return b'<?xml version="1.0"?><LocationConstraint xmlns="http://s3.amazonaws.com/doc/2006-03-01/"/>'
        prefix = query.get("prefix", "")
        after = query.get("continuation-token") or query.get("start-after") or query.get("marker") or ""
        most = min(_PAGE, int(query.get("max-keys", _PAGE)))
        start = max(bisect_left(self._keys, prefix), bisect_right(self._keys, after))
        end = bisect_left(self._keys, prefix + chr(0x10FFFF))
        found = self._keys[start : min(end, start + most)]
        is_cut = start + most < end
        shown = quote if query.get("encoding-type") == "url" else escape
        parts = [
            '<?xml version="1.0" encoding="UTF-8"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
            f"<Name>{BUCKET}</Name><Prefix>{shown(prefix)}</Prefix><MaxKeys>{most}</MaxKeys>"
            f"<KeyCount>{len(found)}</KeyCount><IsTruncated>{str(is_cut).lower()}</IsTruncated>"
        ]
        if shown is quote:
            parts.append("<EncodingType>url</EncodingType>")
        if is_cut:
            parts.append(f"<NextContinuationToken>{escape(found[-1])}</NextContinuationToken>")
            parts.append(f"<NextMarker>{shown(found[-1])}</NextMarker>")
        parts += [
            f"<Contents><Key>{shown(key)}</Key><LastModified>2026-01-02T03:04:05.000Z</LastModified>"
            f"<ETag>{_ETAG}</ETag><Size>{_SIZE}</Size><StorageClass>STANDARD</StorageClass></Contents>"
            for key in found
        ]
        parts.append("</ListBucketResult>")
        return "".join(parts).encode()


async def _run(layout: Layout, count: int, delay: float) -> None:
    server = ListingServer(keys(layout, count), delay)
    listening = await asyncio.start_server(server.serve_connection, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    print(f"http://127.0.0.1:{port}", flush=True)
    await listening.serve_forever()


def main() -> None:
    """Run the server in this process."""
    asyncio.run(_run(Layout(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])))
