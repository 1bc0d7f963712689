"""Messages between mounts, the daemon and the helpers of jobs about which process reads which file.

Mounts see only reads that the page cache does not answer. See cachefs.messages for the rules.
"""

from cachefs.messages import Message


class FileRead(Message, frozen=True, array_like=True):
    """A process has begun to read a file through a mount."""

    # Id of the process's user, as seen by the mount.
    user: int
    # Inode number of the pid namespace, which identifies it on the machine; numbers of process and thread in it.
    namespace: int
    pid: int
    thread: int
    # Inode number of the file, and its path in the mount.
    inode: int
    path: bytes
    # When the mount took the request, while the thread waited: nanoseconds of the machine's monotonic clock.
    when: int


class MountReadReport(Message, frozen=True):
    """Reads reported by a mount's worker, of processes whose users ask for reads (NodeView.asking)."""

    reads: list[FileRead]


class ReadsRequest(Message, frozen=True):
    """A request for the files that processes have read, to be repeated about every second."""

    # Identifies the requester among those of the same user.
    asker: str
    # The pid namespace of *pids*.
    namespace: int
    pids: list[int]


class ReadsResponse(Message, frozen=True):
    """Reads since the last request, in no certain order, of processes of the requester's user."""

    reads: list[FileRead]
    # Number of reads that were not kept.
    missed: int = 0
