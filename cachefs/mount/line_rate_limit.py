"""Rate-limits log lines that untrusted users can trigger."""

import logging


class LineRateLimit(logging.Filter):
    """Passes at most *max_lines* lines per span of *seconds*. The next span's first line tells how many were
    dropped."""

    def __init__(self, max_lines: int, *, seconds: float) -> None:
        super().__init__()
        self._max_lines = max_lines
        self._seconds = seconds
        self._span = 0  # span of the last line, counted from 1970
        self._lines = 0  # lines in that span

    def filter(self, record: logging.LogRecord) -> bool:
        span = int(record.created // self._seconds)
        if span != self._span:
            dropped = max(0, self._lines - self._max_lines)
            if dropped:
                record.msg, record.args = f"{record.getMessage()} ({dropped} earlier lines left out)", None
            self._span, self._lines = span, 0
        self._lines += 1
        return self._lines <= self._max_lines
