"""Debian's Chromium, without a window, driven by Playwright. What the page writes to its console is kept.

A new page in a context of its own takes two processes and a second of a processor. So one page shows one address after
the other.
"""

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from playwright.sync_api import ConsoleMessage, Page, sync_playwright

Scheme = Literal["light", "dark"]
_ARGUMENTS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
]  # fmt: skip
# Milliseconds that the page has for anything a test waits for, beside others on a busy machine.
PATIENCE = 60_000


@dataclass(slots=True)
class Browser:
    """Shows pages."""

    _chromium: Any
    _shared: Page | None = None
    # What pages have complained of: errors of scripts, of the console, and of the policy for content.
    complaints: list[str] = field(default_factory=list)

    @contextmanager
    def page(
        self, url: str, width: int = 1280, height: int = 900, color_scheme: Scheme = "light", *, touch: bool = False
    ) -> Iterator[Page]:
        """Show *url*. *touch*: on a screen that is touched."""
        if self._shared is None:
            self._shared = self._watched(self._chromium.new_page())
        page = self._shared
        page.set_viewport_size({"width": width, "height": height})
        page.emulate_media(color_scheme=color_scheme)
        session = page.context.new_cdp_session(page) if touch else None
        if session is not None:
            session.send("Emulation.setTouchEmulationEnabled", {"enabled": True})
        try:
            page.goto(url)
            yield page
        finally:
            page.goto("about:blank")
            if session is not None:
                session.detach()  # which ends the emulation

    def _watched(self, page: Page) -> Page:
        page.set_default_timeout(PATIENCE)
        page.on("console", lambda message: self._console(message))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        return page

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
