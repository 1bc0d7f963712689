"""Decodes requests with whole nodes (`nodeCacheCapable: false`) in pieces.

Such a request of a cluster of 5,000 nodes has 10 to 60 MB, and kube-scheduler sends it twice for each pod. Decoding
takes msgspec 15 to 90 ms, which block the interpreter in any thread. So the list is cut between nodes and decoded piece
by piece, with other tasks running in between.

Go writes a node with its metadata first, and the name first in there, and escapes quotes within texts. So the text
`},{"metadata":{"name":"` occurs between two nodes and never within one. If that should not hold, some piece is invalid
JSON, and the whole request is decoded at once; pieces that can be decoded are therefore right.
"""

import asyncio
from typing import Final

import msgspec

from cachefs_scheduler.kube.kube_messages import ExtenderArgs, KubeNode, RawNodes

# Bytes from which a request is read in pieces, and bytes of a piece: 1 to 2 ms.
LARGE_BYTES: Final = 1 << 20
_PIECE_BYTES: Final = 512 << 10
_FIRST: Final = b'"items":[{"metadata":{"name":"'
_BETWEEN: Final = b'},{"metadata":{"name":"'
_NODES: Final = b'"Nodes":{'
_END: Final = b"]}"

_args = msgspec.json.Decoder(ExtenderArgs)
_nodes = msgspec.json.Decoder(list[KubeNode])
_raw_nodes = msgspec.json.Decoder(list[msgspec.Raw])
_raw_args = msgspec.json.Decoder(RawNodes)


class ExtenderRequest:
    """A decoded request of kube-scheduler."""

    __slots__ = ("_body", "_pieces", "args", "names")

    def __init__(
        self, body: bytes | bytearray, args: ExtenderArgs, names: list[str], pieces: list[tuple[int, int]]
    ) -> None:
        self._body = body
        # Byte ranges of the pieces of the node list.
        self._pieces = pieces
        self.args = args
        # Names of the nodes, in either form of request.
        self.names = names

    async def nodes_without(self, refused: frozenset[str]) -> list[bytes | memoryview]:
        """Return the node list without *refused* as pieces of JSON; the original bytes if none is refused."""
        found: list[bytes | memoryview] = []
        view = memoryview(self._body)
        for begin, end in self._pieces or [(-1, -1)]:
            piece = view[begin:end] if begin >= 0 else None
            kept: bytes | memoryview
            if piece is not None and not refused:
                kept = piece
            else:
                raw = _raw_items(self._body) if piece is None else _raw_nodes.decode(_as_list(piece))
                names = [msgspec.json.decode(node, type=KubeNode).metadata.name for node in raw]
                kept = b",".join(bytes(node) for node, name in zip(raw, names, strict=True) if name not in refused)
            if len(kept):
                found += (b",", kept) if found else (kept,)
            await asyncio.sleep(0)
        return [b'{"metadata":{},"items":[', *found, b"]}"]


async def decode_request(body: bytes | bytearray) -> ExtenderRequest:
    """Decode a request. Raises msgspec.DecodeError or RecursionError."""
    if len(body) >= LARGE_BYTES and (found := await _decode_in_pieces(body)) is not None:
        return found
    args = _args.decode(body)
    if args.node_names is not None:
        return ExtenderRequest(body, args, args.node_names, [])
    return ExtenderRequest(body, args, [node.metadata.name for node in (args.nodes and args.nodes.items) or ()], [])


async def _decode_in_pieces(body: bytes | bytearray) -> ExtenderRequest | None:
    """Decode a request in pieces. Returns None if it cannot be cut."""
    nodes = body.find(_NODES)
    first = body.find(_FIRST, nodes) if nodes >= 0 else -1
    last = body.rfind(_END)
    if first < 0 or last < first:
        return None
    begin = first + len(b'"items":[')
    names: list[str] = []
    pieces: list[tuple[int, int]] = []
    try:
        args = _args.decode(body[:begin] + body[last:])
        while begin < last:
            cut = body.find(_BETWEEN, begin + _PIECE_BYTES, last)
            end = cut + 1 if cut >= 0 else last
            names += [node.metadata.name for node in _nodes.decode(_as_list(memoryview(body)[begin:end]))]
            pieces.append((begin, end))
            begin = end + 1
            await asyncio.sleep(0)
    except (msgspec.DecodeError, RecursionError):
        return None
    return ExtenderRequest(body, args, names, pieces) if args.nodes is not None and not args.nodes.items else None


def _as_list(piece: memoryview) -> bytes:
    return b"[" + piece + b"]"


def _raw_items(body: bytes | bytearray) -> list[msgspec.Raw]:
    nodes = _raw_args.decode(body).nodes
    return list((nodes.items if nodes is not None else None) or ())
