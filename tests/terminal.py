"""A real terminal of a given size, in which a command runs: tmux on a server of its own."""

import os
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType

from tests.waiting import until


class Terminal:
    """Runs a shell from the start of a `with` block. At its end, all that runs in the terminal is gone."""

    def __init__(
        self, home: Path, environment: Mapping[str, str] | None = None, size: tuple[int, int] = (80, 24)
    ) -> None:
        """home: gets the terminal's socket. environment: is added to this process's. size: columns and lines."""
        assert shutil.which("tmux"), "tmux is missing; .ci/prepare installs it"
        self._socket = home / "tmux"
        self._environment = {**os.environ, "PS1": "$ ", "LC_ALL": "C.UTF-8", **(environment or {})}
        self._environment.pop("TMUX", None)
        self._size = size

    def __enter__(self) -> "Terminal":
        width, height = map(str, self._size)
        self._tmux("-f", "/dev/null", "new-session", "-d", "-x", width, "-y", height, "bash --norc --noprofile")
        self._tmux("set-option", "-g", "status", "off")
        self.until(lambda screen: bool(screen.strip()))  # the prompt: what is typed before would stand in front of it
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        subprocess.run(["tmux", "-S", self._socket, "kill-server"], check=False, capture_output=True)

    def run(self, command: str) -> None:
        """Type a command line."""
        self._tmux("send-keys", "-l", command)
        self.press("Enter")

    def press(self, *keys: str) -> None:
        """Press keys, as tmux calls them: `q`, `Enter`, `C-c`, `Tab`."""
        self._tmux("send-keys", *keys)

    def screen(self, *, colours: bool = False) -> str:
        """The text on it; colours: with the escape sequences of colours."""
        return self._tmux("capture-pane", "-p", *(["-e"] if colours else []))

    def until(self, true: Callable[[str], bool]) -> str:
        """Wait until the screen is as it should be. Returns it; raises AssertionError where it is not in time."""
        return until(self.screen, lambda: f"the screen is right; it is\n{self.screen()}", is_right=true)

    def until_shows(self, *texts: str) -> str:
        """Wait until all of these are on the screen. Returns it."""
        return self.until(lambda screen: all(text in screen for text in texts))

    def shell(self) -> int:
        """The process of the shell."""
        return int(self._tmux("display-message", "-p", "#{pane_pid}"))

    def _tmux(self, *words: str) -> str:
        done = subprocess.run(
            ["tmux", "-S", self._socket, *words], env=self._environment, capture_output=True, text=True, check=False,
            timeout=60,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout
