"""`cachefs-bench programs`: chooses and runs programs, and adds their measurements to a file of documents."""

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import click

from cachefs.errors import CachefsError, ConfigError
from cachefs_bench.lab.slow_link import LinkLimits
from cachefs_bench.programs import report
from cachefs_bench.programs.bench import ProgramBench, ProgramDatasets
from cachefs_bench.programs.catalogue import PROGRAMS, Program, find_programs
from cachefs_bench.programs.figures import RunMode
from cachefs_bench.programs.report import row, table, warm_row
from cachefs_bench.programs.run import RunSettings
from cachefs_tools.child_programs import require_fuse

Document = dict[str, Any]
SCRIPTS: Final = Path(__file__).parents[3] / "tests" / "programs"
LIMITS: Final = LinkLimits(latency=0.025, latency_p99=0.1, bandwidth=40e6)
WARM_TURNS: Final = 5


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


def parse_modes(ctx: click.Context, param: click.Parameter, text: str) -> list[RunMode]:
    """Parse comma-separated modes."""
    try:
        return [RunMode(name.strip()) for name in text.split(",")]
    except ValueError as error:
        raise click.BadParameter(f"{error}; there are {', '.join(RunMode)}") from None


@click.command("programs")
@click.option("--programs", "names", default="", metavar="A,B,C", help="Only these.  [default: all]")
@click.option("--list", "listing", is_flag=True, help="Name the programs, and what each needs.")
@click.option("--modes", callback=parse_modes, default=",".join(RunMode), show_default=True, help="How each is run.")
@click.option("--warm", is_flag=True, help="Instead, with everything in the page cache: what the mount costs.")
@click.option("--python", default=sys.executable, show_default=True, help="The programs' interpreter.")
@click.option("--files", default=500, show_default=True, type=click.IntRange(64, 100_000), help="Size of the datasets.")
@click.option("--epochs", default=2, show_default=True, type=click.IntRange(1, 100), help="Epochs of each program.")
@click.option("--seed", default=1, show_default=True, help="Seed of each program.")
@click.option(
    "--milliseconds",
    type=float,
    help="That computing takes for each sample.  [default: the program's own, 2 or 4; with --warm: 0]",
)
@click.option("--turns", type=click.IntRange(1, 20), help="How often each mode runs.  [default: 1; with --warm: 5]")
@click.option("--json", "as_json", is_flag=True, help="Print the JSON document instead of the table.")
@click.option(
    "--scripts", default=SCRIPTS, type=click.Path(file_okay=False, path_type=Path), help="Where the programs are."
)
@click.option(
    "--data",
    type=click.Path(file_okay=False, path_type=Path),
    help="Where the datasets are kept for another time; what is lacking is made.  [default: a temporary directory]",
)
@click.option(
    "--results",
    "kept",
    type=click.Path(dir_okay=False, path_type=Path),
    help="A JSON document to which what is measured is added; all that it then holds is printed.",
)
@click.option(
    "--markdown",
    "page",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Replace the table of this page, such as docs/programs.md, by what --results then holds.",
)
@click.option("--nothing", is_flag=True, help="Run no program; print what --results holds.")
@click.option(
    "--directory", type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Where to work.  [default: a temporary directory]",
)  # fmt: skip
def programs_command(
    names: str, listing: bool, nothing: bool, as_json: bool, page: Path | None, **options: Any
) -> None:
    """Run training programs of many libraries as they are.

    Each runs on the local disk, on the mount of an empty node whose origin is slow, and under `cachefs run`, with the
    same seed. It measures how long they wait for data, and whether they compute the same.
    """
    programs = [] if nothing else find_programs(names)
    kept: Path | None = options["kept"]
    if page is not None and kept is None:
        raise click.UsageError("--markdown needs --results")
    if listing:
        for one in PROGRAMS:
            click.echo(f"{one.name:<20} {one.title:<38} {' '.join(one.needs)}".rstrip())
        return
    if kept is not None:
        load_results(kept)  # report a bad file before the measurement
    documents = _measure(programs, **options)
    if kept is not None:
        documents = list(load_results(kept).values())
        if page is not None:
            report.write_page(page, load_results(kept))
    click.echo(json.dumps({"programs": documents}, indent=2) if as_json else table(documents))


def _measure(programs: Sequence[Program], **options: Any) -> list[Document]:
    """Measure the programs that can run here. Each document is printed and saved as soon as it is complete."""
    require_fuse()
    if not (options["scripts"] / "measuring.py").exists():
        raise ConfigError(
            f"there are no programs in {options['scripts']}; they come with the sources, or name --scripts"
        )
    documents = []
    with tempfile.TemporaryDirectory(prefix="cachefs-bench-", dir=options["directory"]) as work:
        bench = _bench(Path(work), **options)
        for program in programs:
            if lacking := bench.missing_modules(program):
                _print_line(f"{program.name}: left out, since {options['python']} has no {', '.join(lacking)}")
                continue
            try:
                if options["warm"]:
                    document = bench.measure_warm(program, options["turns"] or WARM_TURNS)
                else:
                    document = bench.measure_cold(program, options["modes"], options["turns"] or 1)
            except CachefsError as error:
                _print_line(f"{program.name}: {error}")
                continue
            documents.append(document)
            _print_line(warm_row(document) if options["warm"] else row(document))
            for line in document.get("said", ()):
                _print_line(f"  {line}")
            if options["kept"] is not None:
                add_result(options["kept"], document)
    return documents


def _bench(work: Path, **options: Any) -> ProgramBench:
    milliseconds = 0.0 if options["warm"] and options["milliseconds"] is None else options["milliseconds"]
    own = () if milliseconds is None else ("--milliseconds", str(milliseconds))
    # Each run has its own directory, so a relative path of the interpreter would break.
    python = os.path.abspath(options["python"]) if os.sep in options["python"] else options["python"]
    setting = RunSettings(python, options["scripts"], options["epochs"], options["seed"], LIMITS, own)
    datasets = ProgramDatasets(options["data"] or work / "data", options["files"], python, options["scripts"])
    return ProgramBench(setting, datasets, work)


def _print_line(text: str) -> None:
    click.echo(text, err=True)
