"""cachectl debug-bundle: collects the information for a maintainer in one file, without secrets."""

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.table import Table

from cachefs_tools.cachectl.command_session import CommandSession, ExitStatus, with_session
from cachefs_tools.cachectl.display import size, table
from cachefs_tools.escaped_names import escape_name

if TYPE_CHECKING:
    from cachefs_tools.debug_bundle.bundle import Bundle


@click.command("debug-bundle")
@click.option("-o", "--output", metavar="FILE.tar.gz", type=click.Path(path_type=Path), help="The file to write.")
@click.option("--config", metavar="FILE", type=click.Path(path_type=Path), help="Configuration file of the daemon.")
@click.option("--log", "logs", metavar="FILE", multiple=True, type=click.Path(path_type=Path),
              help="A log of a mount (its option log=), of which the end is taken; may be given again.")  # fmt: skip
@click.option("--unit", default="cachefsd", metavar="NAME", help="The daemon's unit, for its journal.  [cachefsd]")
@click.option("--no-names", is_flag=True, help="Numbers in place of names of datasets, paths, hosts, jobs and users.")
@with_session
def debug_bundle(
    session: CommandSession, output: Path | None, config: Path | None, logs: tuple[Path, ...], unit: str, no_names: bool
) -> None:
    """Collect diagnostics for a maintainer in one file.

    It holds what doctor, status, job list, stalls and cluster say, the configuration, versions and the end of the
    journal. Secrets are removed: keys, tokens, passwords, signed URLs. Look into the file before you give it away. With
    status 4, a part is missing.
    """
    from cachefs_tools.debug_bundle.bundle import make_bundle, require_new, write_archive
    from cachefs_tools.debug_bundle.parts import BundleNode
    from cachefs_tools.doctor.examination import DEFAULT_CONFIG

    node = BundleNode(session.socket, config or DEFAULT_CONFIG, logs, unit)
    top = time.strftime("cachefs-debug-%Y%m%d-%H%M%S")
    path = output or Path(f"{top}.tar.gz")
    require_new(path)  # before seconds of collecting
    if not session.as_json:
        session.screen.print("The bundle will have, without keys, tokens, passwords and signed URLs:")
        session.screen.print(*(f"  {part.name:<18} {part.title}" for part in node.parts()), sep="\n")
        session.screen.print("")
    with session.screen.status("gathering") as spinner:
        bundle = make_bundle(node, no_names, lambda part: spinner.update(f"gathering {part.name}"))
    count = write_archive(path, top, bundle.files)
    contents = [{"name": name, "bytes": len(text)} for name, text in bundle.files.items()]
    summary = {"file": str(path.absolute()), "bytes": count, "files": contents, "left_out": bundle.left_out}
    session.print_result(summary, *_describe(path, count, bundle))
    if bundle.left_out:
        sys.exit(ExitStatus.INCOMPLETE)


def _describe(path: Path, count: int, bundle: "Bundle") -> Iterator[str | Table]:
    yield table("FILE >SIZE", ((name, size(len(text))) for name, text in bundle.files.items()))
    if bundle.left_out:
        yield ""
        yield table("LEFT-OUT WHY", ((name, escape_name(why)) for name, why in bundle.left_out.items()))
    yield ""
    yield f"{escape_name(str(path))}: {size(count)}, readable by you only. Look into the file before you give it away."
