"""Makes a bundle of its parts: gathered, redacted, pseudonymised if requested, and limited in size.

The bundle is a tar.gz readable by its owner only, written atomically.
"""

import getpass
import gzip
import io
import os
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from cachefs.errors import AlreadyExists, CachefsError
from cachefs_tools.debug_bundle.parts import BundleNode, BundlePart, PartUnavailable, gather_part, part_text
from cachefs_tools.debug_bundle.redaction import Pseudonyms, Redaction

MODE: Final = 0o600
# Most bytes of one file, and of all together.
MAX_FILE_BYTES: Final = 4 << 20
MAX_TOTAL_BYTES: Final = 24 << 20
_CUT_MARK: Final = "\n[cut here: the file is longer than a bundle may have]\n"


def require_new(path: Path) -> None:
    """Raise AlreadyExists if there is a file at *path*."""
    if os.path.lexists(path):
        raise AlreadyExists(f"{path} exists already; name another file with -o")


def write_archive(path: Path, top: str, files: Mapping[str, str]) -> int:
    """Write *files* (name -> text) into a new file at *path*, below the directory *top*. Returns its bytes. Raises
    AlreadyExists if the file exists, CachefsError if it cannot be written."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, MODE)
        try:
            with os.fdopen(descriptor, "wb") as raw:
                os.fchmod(raw.fileno(), MODE)  # independent of the umask
                with gzip.GzipFile(fileobj=raw, mode="wb", filename="") as packed:
                    _add_files(packed, top, files)
                size = raw.tell()
            os.link(draft, path)  # unlike rename, fails for an existing file
        finally:
            draft.unlink(missing_ok=True)
    except FileExistsError:
        raise AlreadyExists(f"{path} exists already; name another file with -o") from None
    except OSError as error:
        raise CachefsError(f"{path} cannot be written: {error.strerror}") from None
    return size


def _add_files(packed: gzip.GzipFile, top: str, files: Mapping[str, str]) -> None:
    with tarfile.open(fileobj=packed, mode="w|") as tar:
        for name, text in files.items():
            content = text.encode("utf-8", "backslashreplace")
            member = tarfile.TarInfo(f"{top}/{name}")
            member.size, member.mode, member.mtime = len(content), MODE, int(time.time())
            tar.addfile(member, io.BytesIO(content))


@dataclass(slots=True)
class Bundle:
    """The contents of a bundle."""

    files: dict[str, str] = field(default_factory=dict)  # by name
    # Name of a missing part -> reason.
    left_out: dict[str, str] = field(default_factory=dict)


def make_bundle(node: BundleNode, hides_names: bool, report: Callable[[BundlePart], None]) -> Bundle:
    """Make the bundle of a node. hides_names: replace names by numbers. report: called with each part before it is
    gathered."""
    bundle = Bundle()
    contents: dict[str, Any] = {}
    for part in node.parts():
        report(part)
        try:
            contents[part.name] = gather_part(part)
        except PartUnavailable as error:
            bundle.left_out[part.name] = str(error)
    redaction = Redaction(node.known_secrets(), set(node.harmless_ids()))
    names = _make_pseudonyms(node, contents) if hides_names else None
    room = MAX_TOTAL_BYTES
    for name, content in contents.items():
        text = _redacted_text(content, redaction, names)
        if not redaction.is_clean(text):
            bundle.left_out[name] = "a secret was still in it"
        elif room <= 0:
            bundle.left_out[name] = "the bundle is full"
        else:
            bundle.files[name] = text
            room -= len(text)
    bundle.left_out = {name: _redacted_text(why, redaction, names) for name, why in bundle.left_out.items()}
    bundle.files["README.txt"] = readme_text(node.parts(), bundle, hides_names)
    return bundle


def _redacted_text(content: Any, redaction: Redaction, names: Pseudonyms | None) -> str:
    if isinstance(content, str):
        content = redaction.redact_text(content)
        text = names.replace_in_text(content) if names is not None else content
    else:
        content = redaction.redact_document(content)
        text = part_text(names.replace_in_document(content) if names is not None else content)
    return text if len(text) <= MAX_FILE_BYTES else text[:MAX_FILE_BYTES] + _CUT_MARK


def readme_text(parts: list[BundlePart], bundle: Bundle, hides_names: bool) -> str:
    """Return the file that lists present and missing parts."""
    titles = {part.name: part.title for part in parts}
    lines = ["A bundle of cachectl debug-bundle. Keys, tokens, passwords and signed URLs were removed."]
    lines += ["Names were replaced by numbers." if hides_names else "Names of datasets, paths and users are in it.", ""]
    lines += [
        f"{name}: {'a log' if name.startswith('log-') else titles[name]}" for name in bundle.files if name in titles
    ]
    lines += ["", *(f"left out: {name}: {why}" for name, why in bundle.left_out.items())]
    return "\n".join(lines) + "\n"


def _make_pseudonyms(node: BundleNode, contents: dict[str, Any]) -> Pseudonyms:
    """Return pseudonyms of all known names, so that they are found in texts too."""
    names = Pseudonyms()
    names.add_names("host", {os.uname().nodename, os.uname().nodename.partition(".")[0]})
    names.add_names("user", _users())
    for dataset in node.datasets.datasets if node.datasets is not None else ():
        names.add_names("dataset", [dataset.name])
        parts = urlsplit(dataset.url)
        names.add_names("bucket", [parts.netloc.rpartition("@")[2]])
    jobs = contents.get("jobs.json") or {}
    names.add_names("job", (job["job"].partition("~")[0] for job in jobs.get("jobs", ())))
    cluster = contents.get("cluster.json") or {}
    names.add_names("cluster", [cluster.get("name", "")])
    for member in cluster.get("members", ()):
        names.add_names("node", [member["name"]])
        names.add_names("host", [member["host"]])
    names.add_names("zone", {member["zone"] for member in cluster.get("members", ())})
    return names


def _users() -> Iterator[str]:
    """Yield the names of the user, and of the user behind sudo."""
    yield os.environ.get("SUDO_USER", "")
    try:
        yield getpass.getuser()
    except (KeyError, OSError):
        return
