"""The users of a process."""

from pathlib import Path


def users_of(pid: int) -> frozenset[int]:
    """Return the real and the effective user id of the process; none where no process has that number."""
    try:
        status = Path(f"/proc/{pid}/status").read_bytes() if pid > 0 else b""
    except OSError:
        return frozenset()
    line = next((line for line in status.splitlines() if line.startswith(b"Uid:")), b"")
    return frozenset(map(int, line.split()[1:3]))
