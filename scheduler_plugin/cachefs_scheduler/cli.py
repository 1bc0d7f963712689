"""`cachefs-scheduler`: start the service, keep it running, and end it in order."""

import click

from cachefs import __version__


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="cachefs-scheduler")
def main() -> None:
    """The service that tells schedulers which nodes hold what a job reads."""
