"""Formats the daemon's log: on stderr, as text or as JSON, and with the priorities of systemd's journal."""

import json
import logging
import os
import sys
from datetime import UTC, datetime
from enum import StrEnum
from typing import Final

from cachefs.errors import remove_secrets

LEVELS: Final = ("debug", "info", "warning", "error")
# Of syslog(3): crit, err, warning, info, debug.
_PRIORITIES: Final = (
    (logging.CRITICAL, 2), (logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6), (logging.NOTSET, 7),
)  # fmt: skip
_VERBOSE_LIBRARIES: Final = ("aiobotocore", "botocore", "asyncio", "grpc")
_TEXT: Final = "%(levelname)s %(name)s: %(message)s"


class LogFormat(StrEnum):
    """The format of a line in the log."""

    TEXT = "text"  # for people
    JSON = "json"  # an object


class _JsonFormatter(logging.Formatter):
    """Formats a line as an object: `time` (ISO 8601, UTC), `level`, `logger`, `message`, and any `exception`."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": remove_secrets(record.getMessage()),
        }
        if record.exc_info:
            line["exception"] = remove_secrets(self.formatException(record.exc_info))
        return json.dumps(line)


class _TextFormatter(logging.Formatter):
    """Formats lines as text. Messages may contain text chosen by users, so control characters are escaped."""

    def format(self, record: logging.LogRecord) -> str:
        return remove_secrets(super().format(record))

    def formatMessage(self, record: logging.LogRecord) -> str:
        line = super().formatMessage(record)
        if line.isprintable():
            return line
        return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in line)


class _PriorityFormatter(logging.Formatter):
    """Prefixes each line with its priority, as in sd-daemon(3): a traceback has many lines."""

    def __init__(self, inner: logging.Formatter) -> None:
        super().__init__()
        self._inner = inner

    def format(self, record: logging.LogRecord) -> str:
        priority = next(number for level, number in _PRIORITIES if record.levelno >= level)
        return "\n".join(f"<{priority}>{line}" for line in self._inner.format(record).splitlines())


def set_up_logging(level: str, form: LogFormat = LogFormat.TEXT) -> None:
    """Log to stderr from now on. May be called again."""
    journal = is_journal()
    # The journal adds the time itself.
    text = _TextFormatter(_TEXT if journal else f"%(asctime)s {_TEXT}")
    formatter = _JsonFormatter() if form is LogFormat.JSON else text
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_PriorityFormatter(formatter) if journal else formatter)
    logging.basicConfig(handlers=[handler], force=True)
    set_level(level)


def set_level(level: str) -> None:
    """Log messages of this level, one of LEVELS, or above it."""
    number = logging.getLevelNamesMapping()[level.upper()]
    logging.getLogger().setLevel(number)
    for chatty in _VERBOSE_LIBRARIES:
        # At `info` libraries log where they have found credentials, at each start and for each origin.
        least = logging.INFO if number <= logging.DEBUG else logging.WARNING
        logging.getLogger(chatty).setLevel(max(least, number))


def current_level() -> str:
    """Return the present level."""
    return logging.getLevelName(logging.getLogger().level).lower()


def is_journal() -> bool:
    """Return whether stderr goes to systemd's journal. The environment variable alone proves nothing: a process that a
    service has started inherits it, whatever its stderr is."""
    try:
        status = os.fstat(2)
    except OSError:
        return False
    return os.environ.get("JOURNAL_STREAM") == f"{status.st_dev}:{status.st_ino}"
