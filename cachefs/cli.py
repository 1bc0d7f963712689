"""The `cachefs` command for training environments: mounts datasets, and runs trainings that publish their reads."""

import errno
import os
import sys
import sysconfig
from pathlib import Path
from typing import Final

import click

import cachefs
from cachefs.extras import DISTRIBUTION

MOUNT_HELPER: Final = "mount.cachefs"
# mount(8) looks only in /sbin, not in $PATH.
MOUNT_HELPER_LINK: Final = Path("/sbin") / MOUNT_HELPER


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(cachefs.__version__, prog_name="cachefs")
def main() -> None:
    """Mount datasets of this node's daemon as plain files, and run trainings that read them."""


@main.command(
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False, "help_option_names": []}
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def mount(arguments: tuple[str, ...]) -> None:
    """Mount a dataset, as mount.cachefs does.

    Arguments: SPEC DIR [-o OPTIONS], as for mount.cachefs.
    """
    script = _helper_script()
    os.execv(script, [str(script), *arguments])


@main.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--job", help="Name of the job (default: of the cluster's job, or the script and its process number).")
@click.option("--socket", help="The daemon's socket (default: $CACHEFS_SOCKET, or the system-wide one).")
@click.option("--quiet", is_flag=True, help="Print only problems. CACHEFS_QUIET=1 has the same effect.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def run(job: str | None, socket: str | None, quiet: bool, command: tuple[str, ...]) -> None:
    """Run a training that publishes what it reads.

    The torch DataLoaders of COMMAND publish what they are going to read. The command is not changed: it gets an
    environment in which Python loads a hook.

    On stderr, lines that begin with "cachefs:" list the mounted datasets and the state of each loader. The last lines
    tell how long the job has waited for data, and what would help.
    """
    from cachefs.run import run_command as become

    sys.exit(become(command, job, socket, quiet=quiet))


@main.command()
@click.option("--force", is_flag=True, help="Replace an existing file at /sbin/mount.cachefs.")
def install_mount_helper(force: bool) -> None:
    """Let `mount -t cachefs` find this environment.

    Links /sbin/mount.cachefs to this environment. Entries in /etc/fstab need the link too.
    """
    script = _helper_script()
    try:
        is_link = MOUNT_HELPER_LINK.is_symlink()
        if is_link and not force and MOUNT_HELPER_LINK.exists() and not MOUNT_HELPER_LINK.samefile(script):
            other = os.path.realpath(MOUNT_HELPER_LINK)
            raise click.ClickException(
                f"{MOUNT_HELPER_LINK} is another installation's ({other}); replace it with --force"
            )
        if force or is_link:
            MOUNT_HELPER_LINK.unlink(missing_ok=True)
        MOUNT_HELPER_LINK.symlink_to(script)
    except OSError as error:
        if error.errno == errno.EEXIST:
            raise click.ClickException(
                f"{MOUNT_HELPER_LINK} exists and is not a link; replace it with --force"
            ) from None
        raise click.ClickException(f"cannot link {MOUNT_HELPER_LINK} ({error.strerror}); this needs root") from None
    click.echo(f"{MOUNT_HELPER_LINK} -> {script}")


def _helper_script() -> Path:
    """Return the path of this environment's mount.cachefs. Raises ClickException."""
    script = Path(sysconfig.get_path("scripts")) / MOUNT_HELPER
    if not script.exists():
        raise click.ClickException(f"{script} is missing; reinstall {DISTRIBUTION} with the pip of {sys.executable}")
    return script
