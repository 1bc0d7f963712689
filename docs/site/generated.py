"""Writes the generated parts of the documentation, and examples of configurations: `.venv/bin/python
docs/site/generated.py`.

A generated part stands between the lines `<!-- generated: NAME -->` and `<!-- end -->` of a page, and is made from the
code by the function of that name in PARTS.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

import configuration_keys

from cachefs.mount.options import option_helps
from cachefs_daemon.metrics.table import TABLE, MetricLabel
from cachefs_daemon.origin.kinds import KINDS

DOCS: Final = Path(__file__).parents[1]
_PART: Final = re.compile(r"(?<=^<!-- generated: )([][a-z-]+)( -->\n).*?(?=^<!-- end -->$)", re.MULTILINE | re.DOTALL)


def mount_options() -> Iterator[str]:
    """Yield the lines of the table of mount options."""
    yield "| option | default | meaning |"
    yield "|---|---|---|"
    for one in option_helps():
        spellings = ", ".join(f"`{spelling}`" for spelling in one.spellings).replace("|", "\\|")
        details = f". {one.details}" if one.details else ""
        yield f"| {spellings} | {one.default} | {one.help}{details} |"


def origins() -> Iterator[str]:
    """Yield the lines of the table of origins."""
    yield (
        "| origin | what names a version | a replaced object is noticed by | checksum of a whole object "
        "| parts of large files | credentials of the daemon |"
    )
    yield "|---|---|---|---|---|---|"
    for kind in KINDS:
        scheme = f"{kind.name}(s)" if f"{kind.name}s" in kind.schemes else kind.name
        yield (
            f"| `{scheme}://` | {kind.version} | {kind.check} | {kind.checksum} | {kind.parts} | {kind.credentials} |"
        )


def metrics() -> Iterator[str]:
    """Yield the lines of the table of metrics."""
    yield "| metric | type, unit | labels | |"
    yield "|---|---|---|---|"
    for metric in TABLE:
        labels = ", ".join(f"`{label.name}`" for label in metric.labels)
        kind = f"{metric.kind}, {metric.unit}"
        yield f"| `{metric.full_name}` | {kind} | {labels} | {metric.description} *{metric.stability}* |"


def metric_labels() -> Iterator[str]:
    """Yield the lines of the table of labels, each kind of which stands at the first metric that has it."""
    yield "| label | values |"
    yield "|---|---|"
    seen: set[MetricLabel] = set()
    for metric in TABLE:
        for label in metric.labels:
            if label not in seen:
                seen.add(label)
                values = label.value_description or ", ".join(f"`{value}`" for value in label.values)
                yield f"| `{label.name}` of `{metric.full_name}` | {values} |"


PARTS: Final[Mapping[str, Callable[[], Iterator[str]]]] = {
    "mount-options": mount_options,
    "origins": origins,
    "metrics": metrics,
    "metric-labels": metric_labels,
    **configuration_keys.parts(),
}


def with_parts(page: str) -> str:
    """Return a page's text with each generated part as it should be."""
    return _PART.sub(lambda found: "".join((found[1], found[2], *(f"{line}\n" for line in PARTS[found[1]]()))), page)


def main() -> None:
    for path in sorted(DOCS.glob("*.md")):
        text = path.read_text()
        if (new := with_parts(text)) != text:
            path.write_text(new)
    for path, example in configuration_keys.examples().items():
        path.write_text(example)


if __name__ == "__main__":
    main()
