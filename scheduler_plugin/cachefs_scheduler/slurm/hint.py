"""`cachefs-slurm-hint`: keeps what Slurm knows of cached datasets up to date."""

import click

from cachefs import __version__


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="cachefs-slurm-hint")
def main() -> None:
    """Keep node features and the hint file of Slurm up to date."""
