"""Identifies callers of the daemon: the daemon's side. See cachefs.identity.

An identity is what the kernel said of a process when it connected, signed with a key that only this run of the daemon
has. So the daemon keeps nothing per caller, and an identity is void after a restart: the client then gets another one.
"""

import asyncio
import contextlib
import errno
import grp
import hmac
import logging
import os
import pwd
import secrets
import socket
import struct
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cachefs.errors import AccessDenied
from cachefs.identity import UNKNOWN_USER_PREFIX
from cachefs_daemon.api.socket_path import ACCEPT_BACKLOG, BACKLOG, SocketPath
from cachefs_daemon.caller import UNKNOWN_CALLER, Caller
from cachefs_daemon.runtime.signing_key import SigningKey

log = logging.getLogger(__name__)

_CREDENTIALS: Final = struct.Struct("iII")  # pid, uid, gid
_GROUP: Final = struct.Struct("I")
_SO_PEERGROUPS: Final = 59
_MAX_GROUPS: Final = 256  # Python's getsockopt takes no larger buffer


@dataclass(frozen=True, slots=True)
class CallerRights:
    """Determines a caller's rights from the kernel's credentials."""

    # The user that the daemon runs as, who has all rights, as root has.
    user: int
    # The group whose members administer; empty for none.
    admin_group: str = ""
    # The group whose members mount; empty for none.
    mount_group: str = ""

    def caller_of(self, uid: int, groups: Collection[int]) -> Caller:
        """Return the caller. groups: ids of all groups of the process."""
        administers = uid in (0, self.user) or _group_id(self.admin_group) in groups
        return Caller(uid, uid == self.user, administers, administers or _group_id(self.mount_group) in groups)

    def require_mount_right(self, caller: Caller) -> None:
        """Raise AccessDenied for a caller that may not mount."""
        if not caller.may_mount:
            raise AccessDenied(f"{caller} may not mount: only {self.mounters} may")

    @property
    def administrators(self) -> str:
        """The users with the right to administer, for messages."""
        return self._and_group(self.admin_group, "[security] admin_group")

    @property
    def mounters(self) -> str:
        """The users with the right to mount, for messages."""
        return self._and_group(self.mount_group, "[daemon] socket_group")

    def _and_group(self, group: str, key: str) -> str:
        users = f"root or user {self.user}" if self.user else "root"
        return f"{users}, or a member of group {group}" if group else f"{users} ({key} can name a group)"


def _group_id(group: str) -> int | None:
    """Return the id of a group; None for an empty or unknown name."""
    try:
        return grp.getgrnam(group).gr_gid if group else None
    except KeyError:
        return None


class Identities:
    """Issues identities on a separate socket, and verifies them."""

    def __init__(self, path: Path, admission: CallerRights) -> None:
        self.socket_path = SocketPath(path)
        self._admission = admission
        self._key = SigningKey(secrets.token_bytes(32))
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Listen, also where the socket was removed. Raises Busy where another daemon listens, or CachefsError."""
        listening = self.socket_path.listen()
        former = self._server
        self._server = await asyncio.start_unix_server(self._send_identity, sock=listening, backlog=ACCEPT_BACKLOG)
        listening.listen(BACKLOG)
        if former is not None:
            former.close()

    def stop(self) -> None:
        self.socket_path.remove()
        if self._server is not None:
            self._server.close()

    def verify(self, identity: str) -> Caller | None:
        """Return the caller with this identity; None where this run of the daemon has not issued it."""
        if not identity.startswith(UNKNOWN_USER_PREFIX):
            return self._verify_signature(identity)
        mount = self._verify_signature(identity.removeprefix(UNKNOWN_USER_PREFIX))
        return UNKNOWN_CALLER if mount is not None and mount.may_mount else None

    def _verify_signature(self, identity: str) -> Caller | None:
        claims, _, signature = identity.rpartition(".")
        if not hmac.compare_digest(self._sign(claims).encode(), signature.encode("utf-8", "replace")):
            return None
        uid, *flags = claims.split(".")
        return Caller(int(uid), *(flag == "1" for flag in flags))

    def issue(self, caller: Caller) -> str:
        claims = f"{caller.uid}.{caller.is_daemon:d}.{caller.is_administrator:d}.{caller.may_mount:d}"
        return f"{claims}.{self._sign(claims)}"

    def _sign(self, claims: str) -> str:
        return self._key.sign(claims.encode("utf-8", "replace")).hex()

    async def _send_identity(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Send an identity, which is small enough that the socket always takes it at once."""
        try:
            uid, groups = peer_credentials(writer.get_extra_info("socket"))
            writer.write(self.issue(self._admission.caller_of(uid, groups)).encode())
        except (OSError, KeyError) as error:
            log.warning("%s: cannot identify a caller: %s", self.socket_path.path, error)
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


def peer_credentials(connection: socket.socket) -> tuple[int, set[int]]:
    """Return the user id and all group ids of the connected process."""
    _, uid, gid = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    try:
        groups = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _MAX_GROUPS * _GROUP.size)
    except OSError as error:
        if error.errno != errno.ERANGE:
            raise
        # Rare, since it may query a directory server.
        return uid, {gid, *os.getgrouplist(pwd.getpwuid(uid).pw_name, gid)}
    return uid, {gid, *(group for (group,) in _GROUP.iter_unpack(groups))}
