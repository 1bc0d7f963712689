"""Requests that real kube-schedulers have sent; README.md says how they were recorded."""

import json
import tarfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

_ARCHIVE = Path(__file__).parent / "bodies.tar.xz"
_REQUEST = ".request.raw.json"


@dataclass(frozen=True, slots=True)
class Recorded:
    """A request, by the name of its file."""

    name: str
    verb: str
    body: bytes
    headers: dict[str, str]

    @property
    def nodes(self) -> list[str]:
        """Names of the nodes that it asks about."""
        args = json.loads(self.body)
        if args["NodeNames"] is not None:
            return list(args["NodeNames"])
        return [node["metadata"]["name"] for node in args["Nodes"]["items"]]


@cache
def recorded() -> list[Recorded]:
    """All of them, in order."""
    with tarfile.open(_ARCHIVE) as archive:
        files = {
            member.name: stream.read() for member in archive if (stream := archive.extractfile(member)) is not None
        }
    return [_read(name, body, files) for name, body in sorted(files.items()) if name.endswith(_REQUEST)]


def annotated(body: bytes, **annotations: str) -> bytes:
    """The request with annotations of cachefs for its pod: `dataset="imagenet"`, `max_jobs_per_copy="2"`."""
    args: dict[str, Any] = json.loads(body)
    metadata = args["Pod"]["metadata"]
    metadata["annotations"] = metadata.get("annotations", {}) | {
        f"cachefs.io/{name.replace('_', '-')}": value for name, value in annotations.items()
    }
    # As Go writes it: no blanks.
    return json.dumps(args, separators=(",", ":")).encode()


def _read(name: str, body: bytes, files: dict[str, bytes]) -> Recorded:
    lines = files[name.replace(_REQUEST, ".headers.txt")].decode().splitlines()
    headers = dict(line.split(": ", 1) for line in lines[1:] if ": " in line)
    return Recorded(name, lines[0].split()[1].rpartition("/")[2], body, headers)
