"""A server between the helper of a training process and a real daemon.

It passes every call on to the daemon and keeps the requests.
"""

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import grpc

from cachefs.errors import CachefsError
from cachefs.job_messages import JobEpoch, JobProgress, JobPublication
from cachefs.messages import Message
from cachefs.rpc import CHANNEL_OPTIONS, ERROR_TRAILER, METHODS, SERVICE, DaemonClient, Method, encode, response_decoder

Kind = TypeVar("Kind", bound=Message)


class Recording:
    """Passes calls on to the daemon of a client, and keeps the requests."""

    def __init__(self, client: DaemonClient, notes: Path) -> None:
        """*notes* is a file for processes that wait for a request: a line per request, which names its kind (`Ended`
        for the progress that says so), job, consumer and epoch (0 where it is about none).
        """
        self.notes = notes
        self.requests: list[Message] = []  # those that the daemon answered without an error, in that order
        self._client = client
        self._lock = threading.Lock()

    def of(self, kind: type[Kind], job: str) -> list[Kind]:
        """The requests so far that are of this kind and about this job."""
        with self._lock:
            return [request for request in self.requests if isinstance(request, kind) and request.job == job]  # type: ignore[attr-defined]

    def handlers(self) -> grpc.GenericRpcHandler:
        """Handlers for all methods that do not stream."""
        unary = {method.name: self._handler(method) for method in METHODS if not method.is_streaming}
        return grpc.method_handlers_generic_handler(SERVICE, unary)

    def _handler(self, method: Method[Any, Any]) -> grpc.RpcMethodHandler:
        def answer(request: Message, context: grpc.ServicerContext) -> Message:
            try:
                reply = self._client.call(method, request)
            except CachefsError as error:
                context.set_trailing_metadata(((ERROR_TRAILER, f"{type(error).__name__}:{error}"),))
                context.abort(grpc.StatusCode.UNKNOWN, str(error))
                raise AssertionError from None  # abort raises
            with self._lock:
                self.requests.append(request)
                if isinstance(request, (JobPublication, JobEpoch, JobProgress)):
                    with self.notes.open("a") as notes:
                        kind = "Ended" if getattr(request, "ended", False) else type(request).__name__
                        words = (kind, request.job, request.consumer, getattr(request, "epoch", 0))
                        notes.write(" ".join(map(str, words)) + "\n")
            return reply

        return grpc.unary_unary_rpc_method_handler(answer, response_decoder(method.request), encode)


@contextlib.contextmanager
def recording(client: DaemonClient, socket: Path) -> Iterator[Recording]:
    """Serve at *socket* while the block runs. What comes there goes to the daemon of *client*."""
    notes = Path(f"{socket}.told")
    notes.touch()
    record = Recording(client, notes)
    server = grpc.server(ThreadPoolExecutor(4), options=CHANNEL_OPTIONS)
    server.add_generic_rpc_handlers((record.handlers(),))
    server.add_insecure_port(f"unix:{socket}")
    server.start()
    try:
        yield record
    finally:
        server.stop(None)
