"""Makes a bundle of its parts: gathered, redacted, pseudonymised if requested, and limited in size."""

import getpass
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urlsplit

from cachefs_tools.debug_bundle.collecting import LeftOut, Node, Part, as_text, gathered
from cachefs_tools.debug_bundle.pseudonyms import Pseudonyms
from cachefs_tools.debug_bundle.redaction import Redaction

# Most bytes of one file, and of all together.
MOST_EACH: Final = 4 << 20
MOST: Final = 24 << 20
_CUT: Final = "\n[cut here: the file is longer than a bundle may have]\n"


@dataclass(slots=True)
class Bundle:
    """The contents of a bundle."""

    files: dict[str, str] = field(default_factory=dict)  # by name
    # Name of a missing part -> reason.
    left_out: dict[str, str] = field(default_factory=dict)


def made(node: Node, hides_names: bool, report: Callable[[Part], None]) -> Bundle:
    """Make the bundle of a node. hides_names: replace names by numbers. report: called with each part before it is
    gathered."""
    bundle = Bundle()
    contents: dict[str, Any] = {}
    for part in node.parts():
        report(part)
        try:
            contents[part.name] = gathered(part)
        except LeftOut as error:
            bundle.left_out[part.name] = str(error)
    redaction = Redaction(node.secrets(), set(node.ids()))
    names = _names(node, contents) if hides_names else None
    room = MOST
    for name, content in contents.items():
        text = _clean(content, redaction, names)
        if not redaction.is_clean(text):
            bundle.left_out[name] = "a secret was still in it"
        elif room <= 0:
            bundle.left_out[name] = "the bundle is full"
        else:
            bundle.files[name] = text
            room -= len(text)
    bundle.left_out = {name: _clean(why, redaction, names) for name, why in bundle.left_out.items()}
    bundle.files["README.txt"] = readme(node.parts(), bundle, hides_names)
    return bundle


def _clean(content: Any, redaction: Redaction, names: Pseudonyms | None) -> str:
    if isinstance(content, str):
        content = redaction.text(content)
        text = names.text(content) if names is not None else content
    else:
        content = redaction.document(content)
        text = as_text(names.document(content) if names is not None else content)
    return text if len(text) <= MOST_EACH else text[:MOST_EACH] + _CUT


def readme(parts: list[Part], bundle: Bundle, hides_names: bool) -> str:
    """Return the file that lists present and missing parts."""
    titles = {part.name: part.title for part in parts}
    lines = ["A bundle of cachectl debug-bundle. Keys, tokens, passwords and signed URLs were removed."]
    lines += ["Names were replaced by numbers." if hides_names else "Names of datasets, paths and users are in it.", ""]
    lines += [
        f"{name}: {'a log' if name.startswith('log-') else titles[name]}" for name in bundle.files if name in titles
    ]
    lines += ["", *(f"left out: {name}: {why}" for name, why in bundle.left_out.items())]
    return "\n".join(lines) + "\n"


def _names(node: Node, contents: dict[str, Any]) -> Pseudonyms:
    """Return pseudonyms of all known names, so that they are found in texts too."""
    names = Pseudonyms()
    names.learn("host", {os.uname().nodename, os.uname().nodename.partition(".")[0]})
    names.learn("user", _users())
    for dataset in node.datasets.datasets if node.datasets is not None else ():
        names.learn("dataset", [dataset.name])
        parts = urlsplit(dataset.url)
        names.learn("bucket", [parts.netloc.rpartition("@")[2]])
    jobs = contents.get("jobs.json") or {}
    names.learn("job", (job["job"].partition("~")[0] for job in jobs.get("jobs", ())))
    cluster = contents.get("cluster.json") or {}
    names.learn("cluster", [cluster.get("name", "")])
    for member in cluster.get("members", ()):
        names.learn("node", [member["name"]])
        names.learn("host", [member["host"]])
    names.learn("zone", {member["zone"] for member in cluster.get("members", ())})
    return names


def _users() -> Iterator[str]:
    """Yield the names of the user, and of the user behind sudo."""
    yield os.environ.get("SUDO_USER", "")
    try:
        yield getpass.getuser()
    except (KeyError, OSError):
        return
