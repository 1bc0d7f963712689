"""HTTP client for the control endpoints of other nodes, with a deadline per request and a size limit per response."""

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final

import aiohttp
from aiohttp.connector import Connection

from cachefs.errors import CachefsError
from cachefs_cluster.membership.handshake import SECRET_HINT
from cachefs_cluster.membership.secret import ProofScope, make_nonce, proofs_match
from cachefs_cluster.membership.view import NodeRecord, format_address
from cachefs_cluster.section import MAX_NODES
from cachefs_cluster.sharing.security import INSECURE, ConnectionSecurity
from cachefs_cluster.sharing.wire import (
    ADDRESSEE,
    CLUSTER,
    INCARNATION,
    LIST,
    NONCE,
    OTHER_INCARNATION,
    PROOF,
    RESPONDER,
    SENDER,
)

CONNECT_SECONDS: Final = 3.0
# Characters of a peer's text that are shown.
_MAX_SHOWN: Final = 200
_RETRY_LATER: Final = frozenset({429, 503})


class PeerFailed(CachefsError):
    """A node did not answer as it should. The text is for people."""


class PeerNotFound(PeerFailed):
    """The node answers that it does not have the requested thing."""


class PeerBusy(PeerFailed):
    """The node answers that it is busy, and wants to be asked later."""


class _PeerHttpResponse(aiohttp.ClientResponse):
    """A response that remembers its TLS object, since a short response has released its connection early."""

    ssl_object: Any = None
    _transport: asyncio.Transport | None = None

    async def start(self, connection: Connection) -> aiohttp.ClientResponse:
        self._transport = connection.transport
        if self._transport is not None:
            self.ssl_object = self._transport.get_extra_info("ssl_object")
        return await super().start(connection)

    def close_connection(self) -> None:
        """Close the connection, so that it is not reused."""
        if self._transport is not None:
            self._transport.abort()


class PeerHttpClient:
    """A client for the control endpoints of all nodes. Used on the event loop."""

    def __init__(self, cluster: str, me: str, security: ConnectionSecurity = INSECURE, list_epoch: int = 0) -> None:
        """me: id of this node. list_epoch: epoch of the static list, 0 without one."""
        self._security = security
        self._scheme = "http" if security.client is None else "https"
        self._headers = {CLUSTER: cluster, SENDER: me, **({LIST: str(list_epoch)} if list_epoch else {})}
        self._me = me
        self._session: aiohttp.ClientSession | None = None
        # By id of a node: the incarnation that answered last, for proofs that must name it.
        self._incarnations: dict[str, str] = {}

    def set_incarnation(self, incarnation: str) -> None:
        """Add this daemon's incarnation to each request."""
        self._headers[INCARNATION] = incarnation
        if self._session is not None:
            self._session.headers[INCARNATION] = incarnation

    async def get(
        self, node: NodeRecord, path: str, seconds: float, most: int, params: Mapping[str, str] | None = None
    ) -> bytes:
        """Return the body of a response, of at most *most* bytes, within *seconds*. Raises PeerFailed."""
        async with self.request(node, "GET", path, seconds, params=params) as response:
            return await read_body(response, most)

    async def post(self, node: NodeRecord, path: str, seconds: float, most: int, body: bytes) -> bytes:
        """Send *body*, and return the response as `get` does."""
        async with self.request(node, "POST", path, seconds, data=body) as response:
            return await read_body(response, most)

    @asynccontextmanager
    async def request(
        self,
        node: NodeRecord,
        method: str,
        path: str,
        seconds: float,
        **more: Any,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Yield a response of *node* with status 200 or 206, whose body is still to be read. *seconds* limits the whole
        block. more: arguments of aiohttp's request. Raises PeerFailed, also for failures within the block."""
        try:
            async with asyncio.timeout(seconds):
                async with self._send_once(node, method, path, **more) as response:
                    if not self._is_restarted(node, response):
                        await self._check_response(node, response)
                        yield response
                        return
                async with self._send_once(node, method, path, **more) as response:
                    await self._check_response(node, response)
                    yield response
        except TimeoutError:
            raise PeerFailed(f"no answer within {seconds:.3g} s") from None
        except aiohttp.ClientConnectorCertificateError as error:
            why = getattr(error.certificate_error, "verify_message", "") or str(error.certificate_error)
            raise PeerFailed(f"its certificate is not trusted: {_safe_text(why)}") from None
        except aiohttp.ServerDisconnectedError:  # in TLS 1.3 a refused client learns no more
            hint = "; its log may say why: perhaps it does not trust this node's certificate"
            raise PeerFailed("it has closed the connection" + hint * (self._scheme == "https")) from None
        except aiohttp.ClientConnectorError as error:  # its text repeats the address, twice
            raise PeerFailed(os.strerror(error.errno) if error.errno else _safe_text(str(error.os_error))) from None
        except aiohttp.ClientError as error:
            raise PeerFailed(_safe_text(str(error)) or type(error).__name__) from None
        except (OSError, ValueError) as error:
            raise PeerFailed(_safe_text(str(error)) or type(error).__name__) from None

    @asynccontextmanager
    async def _send_once(
        self, node: NodeRecord, method: str, path: str, headers: Mapping[str, str] | None = None, **more: Any
    ) -> AsyncIterator["_PeerHttpResponse"]:
        """Send the request once, and check the responder's proof. Raises PeerFailed, and what aiohttp raises."""
        if self._session is None:
            self._session = self._open()
        secret, proof = self._security.secret, {}
        meant = self._incarnations.get(node.id) or node.incarnation
        scope = ProofScope(make_nonce(), self._me, node.id, meant, node.control_port, f"{method} {path}")
        if secret is not None:
            proof = {NONCE: scope.nonce, ADDRESSEE: meant, PROOF: secret.request_proof(scope)}
        async with self._session.request(
            method,
            f"{self._scheme}://{format_address(node.host, node.control_port)}{path}",
            allow_redirects=False,
            ssl=self._security.client() if self._security.client is not None else True,
            headers={**(headers or {}), **proof},
            **more,
        ) as response:
            assert isinstance(response, _PeerHttpResponse)
            if secret is not None:
                incarnation, serves = response.headers.get(ADDRESSEE, ""), response.status < 300
                expected = secret.response_proof(scope, incarnation, serves=serves)
                if (serves and incarnation != meant) or not proofs_match(response.headers.get(PROOF, ""), expected):
                    response.close_connection()
                    raise PeerFailed(f"it does not prove that it knows this cluster's secret: {SECRET_HINT}")
            yield response

    def _is_restarted(self, node: NodeRecord, response: "_PeerHttpResponse") -> bool:
        """Return whether another start of the node's daemon answered: then the request is to be repeated."""
        incarnation = response.headers.get(ADDRESSEE, "")
        if self._security.secret is None or response.headers.get(RESPONDER) != node.id:
            return False
        before = self._incarnations.get(node.id) or node.incarnation
        if len(self._incarnations) >= MAX_NODES:
            self._incarnations.clear()
        self._incarnations[node.id] = incarnation
        return response.status == OTHER_INCARNATION and incarnation != before

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    def _open(self) -> aiohttp.ClientSession:
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=300)
        return aiohttp.ClientSession(
            connector=connector,
            headers=self._headers,
            cookie_jar=aiohttp.DummyCookieJar(),
            response_class=_PeerHttpResponse,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
            auto_decompress=False,
        )

    async def _check_response(self, node: NodeRecord, response: "_PeerHttpResponse") -> None:
        """Raise PeerFailed if the response is not one of *node*, or refuses the request."""
        responder = response.headers.get(RESPONDER, "")
        somebody_else = self._security.refusal(response.ssl_object, node)
        if not somebody_else and responder != node.id:
            somebody_else = f"node {responder[:32]!r} answers at its address, not {node.id}"
        if somebody_else:
            response.close_connection()  # a kept connection would keep that certificate for as long as it is used
            raise PeerFailed(somebody_else)
        if response.status in (200, 206):
            return
        body = await response.content.read(4 * _MAX_SHOWN)
        reason = f"status {response.status}: {_safe_text(body.decode(errors='replace'))}"
        if response.status == 404:
            raise PeerNotFound(reason)
        if response.status in _RETRY_LATER:
            raise PeerBusy(reason)
        raise PeerFailed(reason)


def _safe_text(text: str) -> str:
    """Make a peer's text safe for a line."""
    words = " ".join(text.split())[:_MAX_SHOWN]
    return "".join(letter if letter.isprintable() else "?" for letter in words)


async def read_body(response: aiohttp.ClientResponse, most: int) -> bytes:
    """Return the whole body. Raises PeerFailed if it has more than *most* bytes."""
    if (response.content_length or 0) > most:
        raise PeerFailed(f"a response of {response.content_length:,} bytes; at most {most:,} are accepted")
    # One piece of memory: thousands of small ones, freed together, are not returned to the system.
    body = bytearray(response.content_length or 0)
    size = 0
    async for part in response.content.iter_any():
        if size + len(part) > most:
            raise PeerFailed(f"a response of more than {most:,} bytes")
        body[size : size + len(part)] = part
        size += len(part)
    return bytes(memoryview(body)[:size])
