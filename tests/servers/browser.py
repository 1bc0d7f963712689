"""Debian's Chromium, without a window, driven by Playwright. What the page writes to its console is kept."""

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from playwright.sync_api import ConsoleMessage, Page, sync_playwright

_ARGUMENTS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
]  # fmt: skip
# Milliseconds that the page has for anything a test waits for, beside others on a busy machine.
PATIENCE = 60_000


@dataclass(slots=True)
class Browser:
    """Makes pages, each in a context of its own."""

    _chromium: Any
    # What pages have complained of: errors of scripts, of the console, and of the policy for content.
    complaints: list[str] = field(default_factory=list)

    @contextmanager
    def page(self, url: str, width: int = 1280, height: int = 900, **options: Any) -> Iterator[Page]:
        """options: of a context, such as color_scheme."""
        context = self._chromium.new_context(viewport={"width": width, "height": height}, **options)
        try:
            page = context.new_page()
            page.set_default_timeout(PATIENCE)
            page.on("console", lambda message: self._console(message))
            page.on("pageerror", lambda error: self.complaints.append(str(error)))
            page.goto(url)
            yield page
        finally:
            context.close()

    def _console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)


@contextmanager
def running(environment: Mapping[str, str] | None = None) -> Iterator[Browser]:
    path = shutil.which("chromium")
    if path is None:
        raise RuntimeError("chromium is missing: apt-get install --no-install-recommends chromium")
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(
            executable_path=path, args=_ARGUMENTS, env=dict(environment) if environment else None, timeout=PATIENCE
        )
        try:
            yield Browser(chromium)
        finally:
            chromium.close()
