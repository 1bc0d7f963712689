"""Transport to the daemon: its socket, or, where that is missing or forbidden, the control files of mounts.

Each call chooses anew until one was answered. Then the choice stays, since a daemon has no socket while it restarts.
"""

from typing import Final, TypeVar

from cachefs.errors import ConfigError, NotFound
from cachefs.inodes import slot_of
from cachefs.messages import Empty, Message
from cachefs.mount_spec import MountSpec
from cachefs.mount_table import MountPoint
from cachefs.publishing.control_client import ControlClient
from cachefs.rpc import DATASET_LIST, DaemonClient, Method
from cachefs.socket_path import refusal_reason

Request = TypeVar("Request", bound=Message)
Reply = TypeVar("Reply", bound=Message)

# Seconds without a call after which a job has ended whose process the daemon does not see.
SOCKET_LEASE: Final = 60.0
# A lease through a mount, where the daemon may not trust the process number, and often does not see the process.
CONTROL_LEASE: Final = 30.0
# Maximum timeout of a call until one was answered through a mount, whose daemon may be away.
_FIRST_SECONDS: Final = 10.0


class DaemonTransport:
    """Calls the daemon for one process."""

    def __init__(self, socket: DaemonClient) -> None:
        self._socket = socket
        self._control = ControlClient()
        self._answering_client: DaemonClient | ControlClient | None = None  # the client that was answered

    @property
    def socket_refusal(self) -> str:
        """The reason why the socket cannot be used; "" where it can, or was used."""
        return "" if self._client is self._socket else refusal_reason(self._socket.socket)

    @property
    def lease(self) -> float:
        """The lease in seconds, see JobPublication."""
        return SOCKET_LEASE if self._client is self._socket else CONTROL_LEASE

    def call(self, method: Method[Request, Reply], request: Request, timeout: float) -> Reply:
        """Call the daemon, with the arguments and errors of DaemonClient.call."""
        client = self._client
        if self._answering_client is None and client is self._control:
            timeout = min(timeout, _FIRST_SECONDS)
        try:
            reply = client.call(method, request, timeout)
        except ConfigError as error:
            if self._answering_client is None and client is self._control:
                raise ConfigError(f"{refusal_reason(self._socket.socket)}, and {error}") from None
            raise
        self._answering_client = client
        return reply

    def dataset_at(self, mount: MountPoint, slot: int, timeout: float) -> tuple[str, str]:
        """Return name and snapshot of the dataset with inodes of this slot. Raises NotFound, and as `call`."""
        client = self._client
        if isinstance(client, ControlClient):
            try:
                return client.dataset_at(mount, slot)
            except ConfigError as error:
                raise ConfigError(f"{refusal_reason(self._socket.socket)}, and {error}") from None
        views = self.call(DATASET_LIST, Empty(), timeout).datasets
        spec = MountSpec.parse(mount.spec)
        views = [view for view in views if spec.is_showing(view.name)]
        # Current snapshots come before others. `snapshot` is empty where a dataset's snapshot is lost.
        snapshots = [(view.name, view.snapshot) for view in views if view.snapshot]
        snapshots += [(view.name, snapshot) for view in views for snapshot in view.others]
        for name, snapshot in snapshots:
            if slot_of(snapshot) == slot:
                return name, snapshot
        raise NotFound(f"the daemon at {client.socket} does not know the snapshot at {mount.path}")

    @property
    def _client(self) -> DaemonClient | ControlClient:
        if self._answering_client is not None:
            return self._answering_client
        return self._control if refusal_reason(self._socket.socket) else self._socket
