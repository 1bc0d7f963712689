"""What mounts, the daemon and the helpers of jobs say to each other about which process reads which file.

Only reads that come to a mount are known, so none of what is in the page cache. See cachefs.messages for the rules.
"""

from cachefs.messages import Message


class FileRead(Message, frozen=True, array_like=True):
    """A process has begun to read a file through a mount."""

    # Whose process it is: its user id, as the mount sees it.
    user: int
    # The process and the thread, by their numbers in their own pid namespace; and the inode number of that, which names
    # it on the whole machine.
    namespace: int
    pid: int
    thread: int
    # The file: its inode number, and its path in the mount.
    inode: int
    path: bytes
    # When the mount took the request: nanoseconds of the machine's monotonic clock. The thread was waiting then.
    when: int


class MountReads(Message, frozen=True):
    """A worker of a mount tells of reads by processes of users who ask for them (NodeView.asking)."""

    reads: list[FileRead]


class ReadsAsked(Message, frozen=True):
    """Which files do these processes read? Whoever asks has to ask again every second or so."""

    # Names who asks, among those of the same user.
    asker: str
    # The pid namespace in which the processes have these numbers.
    namespace: int
    pids: list[int]


class ReadsTold(Message, frozen=True):
    """Reads since the last question, in no certain order: of processes of the same user only."""

    reads: list[FileRead]
    # How many were not kept.
    missed: int = 0
