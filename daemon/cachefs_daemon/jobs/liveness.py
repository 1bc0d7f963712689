"""How long somebody who published something is taken to be there."""

import time
from dataclasses import dataclass, field

import psutil


@dataclass(slots=True)
class Liveness:
    """Of a process of this node for as long as it lives; without one (pid 0, or that of another pid namespace), until
    *seconds* have passed without a sign of life. born: see `birth_of`."""

    pid: int
    seconds: float
    born: float = field(init=False)
    _renewed: float = field(init=False)

    def __post_init__(self) -> None:
        self.born = birth_of(self.pid)
        self.renew()

    def renew(self) -> None:
        self._renewed = time.monotonic()

    @property
    def silence(self) -> float:
        """Seconds since the last sign of life."""
        return time.monotonic() - self._renewed

    def lapsed(self) -> str:
        """Why it is over; nothing while it is not."""
        if self.born:
            return "" if birth_of(self.pid) == self.born else f"its process {self.pid} is gone"
        return f"no sign of life for {self.seconds:.0f} s" if self.silence > self.seconds else ""


def birth_of(pid: int) -> float:
    """When the process started (unix seconds), which tells it from a later one of the same number; 0 where there is
    none."""
    if pid <= 0:
        return 0.0
    try:
        process = psutil.Process(pid)
        return 0.0 if process.status() == psutil.STATUS_ZOMBIE else float(process.create_time())
    except psutil.Error:
        return 0.0
