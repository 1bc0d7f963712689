"""TLS to servers: the trusted authorities, and the last session with each server, which saves most of a handshake."""

import asyncio
import os
import ssl
from typing import Any


def retrieve_exception(done: "asyncio.Future[Any]") -> None:
    """Retrieve a failure, so that asyncio does not complain when all waiters have gone."""
    if not done.cancelled():
        done.exception()


class ClientTls:
    """The TLS context and sessions of one client, for all servers. Used on the event loop."""

    def __init__(self, verify: bool | str) -> None:
        """verify: a file or directory with certificates of authorities; True: those that botocore trusts."""
        self._verify = verify
        self._context: asyncio.Future[ssl.SSLContext] | None = None
        self._sessions: dict[str, ssl.SSLSession] = {}  # by name of the server

    async def context(self) -> ssl.SSLContext:
        """Return the context, loaded in a thread. Raises ssl.SSLError if the certificates cannot be read."""
        if self._context is None or (self._context.done() and self._context.exception()):
            # Reading the certificates takes 10 to 20 ms.
            self._context = asyncio.ensure_future(asyncio.to_thread(self._load))
            self._context.add_done_callback(retrieve_exception)
        return await asyncio.shield(self._context)

    def remember_session(self, transport: asyncio.BaseTransport) -> None:
        """Keep the session of a connection after its first response. TLS 1.3 has none before."""
        connection = transport.get_extra_info("ssl_object")
        if connection is not None and connection.session is not None:
            self._sessions[connection.server_hostname] = connection.session

    def _load(self) -> ssl.SSLContext:
        from botocore.httpsession import create_urllib3_context, get_cert_path  # takes 0.05 s to import

        context: ssl.SSLContext = create_urllib3_context()
        context.check_hostname = True
        # Most servers resume sessions of TLS 1.2 by tickets.
        context.options &= ~ssl.OP_NO_TICKET
        where = get_cert_path(self._verify)
        try:
            if os.path.isdir(where):
                context.load_verify_locations(capath=where)
            else:
                context.load_verify_locations(cafile=where)
        except OSError as error:  # its text does not name the file
            raise ssl.SSLError(error.errno, f"the certificates in {where} cannot be read: {error}") from None
        sessions = self._sessions

        class Resuming(ssl.SSLObject):
            """Resumes the last session. asyncio has no parameter for one."""

            begun = False

            def do_handshake(self) -> None:
                if not self.begun and self.server_hostname in sessions:
                    self.session = sessions[self.server_hostname]
                self.begun = True
                super().do_handshake()

        context.sslobject_class = Resuming
        return context
