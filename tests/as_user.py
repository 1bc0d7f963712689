"""Commands as another user, for tests that run as root."""

import contextlib
import shlex
import stat
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

NOBODY = 65534

# Where the Python that runs the tests lies, and what it imports.
_NEEDED: Final = (Path(sys.base_prefix), Path(sys.prefix), Path(__file__).parents[1])


def as_user(uid: int, groups: Iterable[int] = ()) -> list[str]:
    """What to put in front of a command. The user has no capabilities, and may look nowhere where others may not."""
    supplementary = ",".join(map(str, groups))
    chosen = f"--groups={supplementary}" if supplementary else "--clear-groups"
    return [*_python_in_sight(), "setpriv", f"--reuid={uid}", f"--regid={uid}", chosen, "--inh-caps=-all"]


@contextlib.contextmanager
def public_directory() -> Iterator[Path]:
    """A new directory that every user can reach, which those of pytest are not. Its path is short."""
    with tempfile.TemporaryDirectory(prefix="cachefs-public-", ignore_cleanup_errors=True) as name:
        Path(name).chmod(0o755)
        yield Path(name)


def _python_in_sight() -> list[str]:
    """What to put in front of a command so that Python can be run where it lies in a directory of root alone, such as
    /root. The command sees another directory there, in which there is only what Python needs."""
    steps = ["umask 022"]
    needed: dict[Path, set[Path]] = {}
    for place in (path.resolve() for path in _NEEDED):
        closed = next((one for one in reversed(place.parents) if not one.stat().st_mode & stat.S_IXOTH), None)
        if closed is not None:
            needed.setdefault(closed, set()).add(place)
    for closed, places in needed.items():
        apart = sorted(place for place in places if places.isdisjoint(place.parents))
        held = list(enumerate(map(shlex.quote, map(str, apart)), 3))
        steps += [f"exec {number}<{place}" for number, place in held]
        steps.append(f"mount -t tmpfs -o mode=0755 cachefs-tests {shlex.quote(str(closed))}")
        for number, place in held:
            steps += [f"mkdir -p {place}", f"mount -c --bind /proc/self/fd/{number} {place}", f"exec {number}<&-"]
    if not needed:
        return []
    script = " && ".join([*steps, 'exec "$@"'])
    return ["unshare", "--mount", "--propagation", "slave", "sh", "-c", script, "sh"]
