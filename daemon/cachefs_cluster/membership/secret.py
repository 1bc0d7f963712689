"""The secret that daemons on loopback share, and proofs that each side of a request knows it.

A loopback port is open to every user of the machine, and so is the port of a daemon that has ended. So each request has
a nonce and a proof (a keyed BLAKE2b), and so has each response. The secret itself never leaves the daemon. Another user
who has taken the port of a daemon that is down may relay what arrives there, so a proof is valid nowhere else: that of
a request names the node, the start of its daemon and the port that are addressed; that of a response names all of
these, the sender, and whether the request is served or refused. Only a proven request is served, so no node gives
another user, who proves nothing, the bytes that could answer for a block.

Nodes with certificates have no secret, and nor have nodes with `insecure_peers`.
"""

import hashlib
import hmac
import logging
import os
import pwd
import re
import secrets
import stat
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from cachefs.errors import ConfigError

if TYPE_CHECKING:  # processes that serve peers would import pydantic for it
    from cachefs_cluster.section import ClusterSection

# Random bytes of a secret that a daemon makes; least and most bytes of a file, without its line end.
_GENERATED_BYTES: Final = 24
_MIN_BYTES: Final = 16
_MAX_BYTES: Final = 64
_SAFE_FLAGS: Final = os.O_NONBLOCK | os.O_CLOEXEC
# The default file, below the home directory of the daemon's user.
_BELOW_HOME: Final = ".local/state/cachefs/cluster-secret"

SHM = Path("/dev/shm")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ProofScope:
    """The one request that a proof, and the proof of its response, are valid for."""

    nonce: str
    # Ids of the requesting and of the addressed node.
    sender: str
    addressee: str
    # The addressed start of the addressee's daemon.
    incarnation: str
    # Port of the addressee.
    port: int
    purpose: str


@dataclass(frozen=True, slots=True)
class ClusterSecret:
    """A secret of _MIN_BYTES to _MAX_BYTES bytes."""

    key: bytes
    # The default file; None if the configuration names a file, which its owner keeps.
    file: Path | None = field(default=None, compare=False)

    def restore_file(self) -> None:
        """Make the default file again if it is gone, so that the next daemon has the same secret: logind removes a
        user's files in /dev/shm when the user logs out. Raises ConfigError."""
        if self.file is None or self.file.exists():
            return
        try:
            self.file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _make_key_file(self.file, os.O_NOFOLLOW, self.key)
        except OSError as error:
            raise ConfigError(
                f"{str(self.file)!r}, the secret of this node's cluster, was removed and cannot be made again: "
                f"{error.strerror}; name a file in cluster.secret_file, and restart all nodes"
            ) from None

    def __repr__(self) -> str:
        return "ClusterSecret(...)"

    def request_proof(self, scope: ProofScope) -> str:
        """Return the proof to the addressee that the sender makes the request."""
        return self._proof("request", scope)

    def response_proof(self, scope: ProofScope, incarnation: str, *, serves: bool) -> str:
        """Return the proof to the sender that start *incarnation* of the addressee responds, and serves or refuses."""
        return self._proof("served" if serves else "refused", scope, incarnation)

    def _proof(self, kind: str, scope: ProofScope, start: str = "") -> str:
        # `purpose` comes last: the other fields have no line ends.
        head = f"{kind}\n{scope.nonce}\n{scope.sender}\n{scope.addressee}\n{scope.incarnation}\n{scope.port}\n{start}"
        text = f"{head}\n{scope.purpose}".encode("utf-8", "backslashreplace")
        return hashlib.blake2b(text, key=self.key, digest_size=32).hexdigest()


_NONCE: Final = re.compile(r"[0-9a-f]{32}")


def is_nonce(text: str) -> bool:
    return _NONCE.fullmatch(text) is not None


def make_nonce() -> str:
    """Return 32 random hex digits, to be used once."""
    return secrets.token_hex(16)


def proofs_match(received: str, expected: str) -> bool:
    """Compare two proofs in constant time."""
    return hmac.compare_digest(received.encode("utf-8", "replace"), expected.encode())


def default_secret_file() -> Path:
    """Return the file that all daemons of one user on one machine share, whatever their state directories: below the
    user's home directory, where no other user can make it first, or in /dev/shm without such a directory.

    A file that an earlier daemon made in either place is used, even if the mode of the directory has changed since.
    """
    user = os.geteuid()
    in_shm = SHM / f"cachefs-secret-{user}"
    try:
        home = Path(pwd.getpwuid(user).pw_dir)
    except KeyError:
        return in_shm
    for path in (home / _BELOW_HOME, in_shm):
        if _is_own_file(path, user):
            return path
    return home / _BELOW_HOME if _is_private(home, user) and os.access(home, os.W_OK | os.X_OK) else in_shm


def _is_own_file(path: Path, user: int) -> bool:
    """Return whether the path is a regular file, and no link, of this user."""
    try:
        found = path.lstat()
    except OSError:
        return False
    return stat.S_ISREG(found.st_mode) and found.st_uid == user


def _is_private(directory: Path, user: int) -> bool:
    """Return whether only that user can make files in the directory."""
    try:
        found = directory.stat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == user and not found.st_mode & 0o022


def load_secret(section: "ClusterSection") -> ClusterSecret | None:
    """Return the secret of this node's cluster; None if it needs none. The first daemon makes the file.

    Raises ConfigError if the file cannot be used, or is not a secret.
    """
    if not section.needs_secret:
        return None
    path, is_named = section.secret_file or default_secret_file(), section.secret_file is not None
    # A file that the configuration names may be a link, like those of a mounted Kubernetes Secret.
    follow = 0 if is_named else os.O_NOFOLLOW
    try:
        if not is_named:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        key = _read_key(path, follow) or _make_key_file(path, follow, secrets.token_hex(_GENERATED_BYTES).encode())
        return ClusterSecret(key, None if is_named else path)
    except OSError as error:
        hint = "" if is_named else "; name another file, the same for all daemons of the cluster"
        raise ConfigError(f"cluster.secret_file = {str(path)!r}: {error.strerror}{hint}") from None


def _read_key(path: Path, follow: int) -> bytes:
    """Return the file's content; b"" without a file. follow: O_NOFOLLOW to refuse a link. Raises OSError,
    ConfigError."""
    try:
        descriptor = os.open(path, os.O_RDONLY | _SAFE_FLAGS | follow)
    except FileNotFoundError:
        return b""
    try:
        found = os.fstat(descriptor)
        if why := _file_problem(found):
            raise ConfigError(f"cluster.secret_file = {str(path)!r}: {why}")
        if found.st_mode & 0o040:
            log.info("cluster.secret_file = %r: members of group %d can act as nodes", str(path), found.st_gid)
        key = os.read(descriptor, _MAX_BYTES + 2).strip()
    finally:
        os.close(descriptor)
    if not _MIN_BYTES <= len(key) <= _MAX_BYTES:
        raise ConfigError(
            f"cluster.secret_file = {str(path)!r}: it has {len(key)} bytes, and a secret {_MIN_BYTES} to {_MAX_BYTES}; "
            "remove it, and the next daemon that starts makes a new one"
        )
    return key


def _file_problem(found: os.stat_result) -> str:
    """Return why a file is not a secret of this daemon, or ""."""
    if not stat.S_ISREG(found.st_mode):
        return "it is not a file"
    if found.st_uid not in (0, os.geteuid()):
        return f"it belongs to user {found.st_uid}, who could know it; name another file"
    if found.st_mode & 0o027:
        return f"mode {stat.S_IMODE(found.st_mode):04o} lets other users read or change it; `chmod 600` it"
    return ""


def _make_key_file(path: Path, follow: int, key: bytes) -> bytes:
    """Make the file, or read the one that another daemon has made meanwhile. Raises OSError, ConfigError."""
    fresh = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | _SAFE_FLAGS, 0o600)
    try:
        os.write(descriptor, key + b"\n")
        os.fsync(descriptor)
        with suppress(FileExistsError):
            path.hardlink_to(fresh)
    finally:
        os.close(descriptor)
        fresh.unlink()
    if not (found := _read_key(path, follow)):
        raise ConfigError(f"cluster.secret_file = {str(path)!r}: it was removed as it was made; start again")
    return found
