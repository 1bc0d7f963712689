"""Tells users which extra of the distribution to install where a command lacks its packages."""

import contextlib
import json
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote, urlsplit

if TYPE_CHECKING:
    from importlib.metadata import Distribution

# The name of the distribution. The name of the import package, `cachefs`, belongs to another project on PyPI.
DISTRIBUTION: Final = "cachefsd"
USAGE_EXIT_STATUS: Final = 2
_OWN_PACKAGES: Final = (
    "cachefs", "cachefs_cluster", "cachefs_daemon", "cachefs_scheduler", "cachefs_tools", "cachefsd",
)  # fmt: skip


def install_command(extra: str, installed: "Distribution | None" = None) -> str:
    """Return the command that installs an extra, as the end of a message.

    cachefs is on no package index, so pip needs the directory or file from which it was installed, which pip records
    (PEP 610). installed: the distribution to examine; None for this one.
    """
    options, source = _installed_from(installed)
    if source:
        return f"{sys.executable} -m pip install {options}{shlex.quote(f'{source}[{extra}]')}"
    return f"pip install '.[{extra}]' in a clone of cachefs, as it is on no package index"


def _installed_from(installed: "Distribution | None") -> tuple[str, str]:
    """Return pip's options and the path from which it installed the distribution; "" where the path is gone."""
    # A late import, which takes 20 ms: a command that lacks nothing does not need it.
    from importlib.metadata import PackageNotFoundError, distribution

    with contextlib.suppress(PackageNotFoundError, ValueError, AttributeError):
        noted = json.loads((installed or distribution(DISTRIBUTION)).read_text("direct_url.json") or "{}")
        url = urlsplit(noted.get("url", ""))
        path = Path(unquote(url.path))
        if url.scheme == "file" and path.exists():
            return "-e " if noted.get("dir_info", {}).get("editable") else "", str(path)
    return "", ""


@contextlib.contextmanager
def require_extra(extra: str, command: str) -> Iterator[None]:
    """Wrap the imports of a command: where a package of the extra is missing, print how to install it, and exit."""
    try:
        yield
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if not missing or missing in _OWN_PACKAGES:
            raise
        print(f"{command}: {missing} is not installed; install it with: {install_command(extra)}", file=sys.stderr)
        sys.exit(USAGE_EXIT_STATUS)
