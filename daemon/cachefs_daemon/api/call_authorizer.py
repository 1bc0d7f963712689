"""Checks the rights of callers. docs/operations.md has a table of the rights for users."""

from dataclasses import dataclass
from typing import Any

from cachefs.errors import AccessDenied, Unidentified
from cachefs.identity import IDENTITY_KEY
from cachefs.rpc import AccessRight, Method
from cachefs_daemon.api.identity import CallerRights, Identities
from cachefs_daemon.caller import Caller


@dataclass(frozen=True, slots=True)
class CallAuthorizer:
    """Checks the identity and the rights of each call's caller."""

    identities: Identities
    admission: CallerRights

    def authorize_call(self, method: Method[Any, Any], context: Any) -> tuple[Caller, ...]:
        """Return the arguments about the caller that *method* needs: the caller where jobs belong to users, else none.
        Raises AccessDenied where the caller may not call, Unidentified where it must identify itself first."""
        if method.right == AccessRight.LOOK:
            return ()
        identity = next((value for key, value in context.invocation_metadata() or () if key == IDENTITY_KEY), "")
        caller = self.identities.verify(identity)
        if caller is None:
            raise Unidentified(
                f"the daemon cannot identify the caller of {method.name}: {self.identities.socket_path.path} cannot be "
                "reached; in a container, mount the directory of the daemon's socket, not only the socket"
            )
        if method.right == AccessRight.ADMINISTER and not caller.is_administrator:
            raise AccessDenied(f"{caller} may not call {method.name}: only {self.admission.administrators} may")
        if method.right == AccessRight.MOUNT:
            self.admission.require_mount_right(caller)
        return (caller,) if method.right == AccessRight.JOB else ()
