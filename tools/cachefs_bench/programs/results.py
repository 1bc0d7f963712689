"""A file of program documents, to which measurements are added one by one."""

import json
from pathlib import Path
from typing import Any

from cachefs.errors import ConfigError
from cachefs_bench.programs.catalogue import PROGRAMS

Document = dict[str, Any]


def load_results(path: Path) -> dict[str, Document]:
    """Return documents by program name. Raises ConfigError."""
    if not path.exists():
        return {}
    try:
        return {document["program"]: document for document in json.loads(path.read_text())["programs"]}
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"{path} holds no results of this benchmark: {error}") from None


def add_result(path: Path, document: Document) -> None:
    """Merge a document into that of its program, and keep all others."""
    documents = load_results(path)
    documents[document["program"]] = {**documents.get(document["program"], {}), **document}
    order = {program.name: number for number, program in enumerate(PROGRAMS)}
    rows = sorted(documents.values(), key=lambda one: order.get(one["program"], len(order)))
    unfinished = path.with_name(path.name + ".new")
    unfinished.write_text(json.dumps({"programs": rows}, indent=1) + "\n")
    unfinished.replace(path)
