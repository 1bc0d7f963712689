"""Commands as another user, for tests that run as root."""

from collections.abc import Iterable

NOBODY = 65534

# The Python that runs the tests may lie where only root may look, such as in /root. So the user keeps root's right to
# read, and no other one: whatever it writes to, such as a socket, it must be allowed to.
_READS = ("--inh-caps=-all,+dac_read_search", "--ambient-caps=-all,+dac_read_search")


def as_user(uid: int, groups: Iterable[int] = ()) -> list[str]:
    """What to put in front of a command."""
    supplementary = ",".join(map(str, groups))
    chosen = f"--groups={supplementary}" if supplementary else "--clear-groups"
    return ["setpriv", f"--reuid={uid}", f"--regid={uid}", chosen, *_READS]
