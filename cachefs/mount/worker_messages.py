"""Messages of a mount's worker to its supervisor, one packet of a socket per message."""

from enum import StrEnum


class WorkerMessage(StrEnum):
    # The worker answers requests.
    READY = "ready"
    # A heartbeat of the loop that answers requests, sent every second.
    HEARTBEAT = "beat"
    # The mount has ended.
    ENDED = "over"
    # The worker cannot serve, for the reason given.
    FAILED = "failed"


def pack(message: WorkerMessage, reason: str = "") -> bytes:
    return f"{message} {reason}".encode()


def unpack(packet: bytes) -> tuple[WorkerMessage, str]:
    """Return the message, and the reason given."""
    message, _, reason = packet.decode().partition(" ")
    return WorkerMessage(message), reason
