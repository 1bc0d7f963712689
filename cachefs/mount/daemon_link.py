"""gRPC calls from a process of the mount to its daemon, awaited from trio.

A call is a gRPC future whose completion wakes the waiting task, so that a hundred readers that wait for the origin take
no threads. gRPC does not survive a fork: a link must be created after the last one.
"""

import contextlib
from typing import Any, TypeVar

import grpc
import trio

from cachefs.messages import Message
from cachefs.rpc import DaemonClient, Method

Request = TypeVar("Request", bound=Message)
Reply = TypeVar("Reply", bound=Message)


class DaemonLink:
    """Makes the calls of one process of the mount."""

    def __init__(self, client: DaemonClient) -> None:
        self.client = client

    async def call(self, method: Method[Request, Reply], request: Request, seconds: float) -> Reply:
        """Return the daemon's reply. Waits at most *seconds*, also for a daemon that has not started yet.

        Raises as DaemonClient.call does.
        """
        until = trio.current_time() + seconds
        while True:
            used = self.client.identity
            try:
                return await self._call(method, request, max(0.0, until - trio.current_time()))
            except grpc.RpcError as error:
                if not await trio.to_thread.run_sync(self.client.renew_identity, error, used):
                    raise self.client.translate_error(error) from None

    async def _call(self, method: Method[Request, Reply], request: Request, seconds: float) -> Reply:
        """Raises grpc.RpcError."""
        token = trio.lowlevel.current_trio_token()
        has_response = trio.Event()

        def wake(_: Any) -> None:
            with contextlib.suppress(trio.RunFinishedError):
                token.run_sync_soon(has_response.set)

        future = self.client.start_call(method, request, seconds)
        future.add_done_callback(wake)
        try:
            await has_response.wait()
            reply: Reply = future.result()
            return reply
        finally:
            future.cancel()
