"""The bytes of GETs of objects, signed if the route requires it."""

import time
from typing import Any

from cachefs_daemon.origin.base import ObjectRange
from cachefs_daemon.origin.s3.response import CHECKSUM_HEADER
from cachefs_daemon.origin.s3.route import S3Route, Signer

_Headers = list[tuple[str, str]]


class RequestMaker:
    """Makes the requests of one moment for one bucket, from headers that it prepares once."""

    def __init__(self, route: S3Route, credentials: Any, *, checksums: bool = True) -> None:
        """credentials: frozen, of botocore; None for unsigned requests. checksums: request those of whole objects."""
        self._route = route
        self._signer: Signer | None = None
        own: _Headers = []
        if route.region:
            when = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
            self._signer = Signer(credentials.access_key, credentials.secret_key, route.region, route.service, when)
            own = [("x-amz-content-sha256", route.payload), ("x-amz-date", when)]
            if route.payer:
                own.append(("x-amz-request-payer", route.payer))
            if credentials.token:
                own.append(("x-amz-security-token", credentials.token))
        self._sent_part = _lines(own, ": ", "\r\n")
        self._signed_part = _lines(own, ":", "\n")
        self._names_part = ";".join(["host", "if-match", "range", *(name for name, _ in own)])
        if checksums:
            own.insert(0, CHECKSUM_HEADER)
        self._sent_whole = _lines(own, ": ", "\r\n")
        self._signed_whole = _lines(own, ":", "\n")
        self._names_whole = ";".join(["host", "if-match", *(name for name, _ in own)])
        self._end = f"user-agent: {route.user_agent}\r\naccept-encoding: identity\r\n\r\n"

    def make_get(self, key: str, etag: str, wanted: ObjectRange) -> bytes:
        """Return a request for the *wanted* bytes. etag: printable ASCII without blanks."""
        route = self._route
        path = route.path(key)
        if wanted.length == wanted.size:
            # A whole object needs no range, and servers that handle ranges badly then answer right.
            part, sent, signed, names = "", self._sent_whole, self._signed_whole, self._names_whole
        else:
            part = f"bytes={wanted.offset}-{wanted.offset + wanted.length - 1}"
            sent, signed, names = self._sent_part, self._signed_part, self._names_part
        proof = ""
        if self._signer is not None:
            span = f"range:{part}\n" if part else ""
            lines = f'host:{route.host}\nif-match:"{etag}"\n{span}{signed}'
            proof = f"authorization: {self._signer.authorization(path, lines, names, route.payload)}\r\n"
        span = f"range: {part}\r\n" if part else ""
        return (
            f'GET {path} HTTP/1.1\r\nhost: {route.host}\r\nif-match: "{etag}"\r\n{span}{sent}{proof}{self._end}'
        ).encode()


def _lines(headers: _Headers, colon: str, end: str) -> str:
    return "".join(f"{name}{colon}{value}{end}" for name, value in headers)
