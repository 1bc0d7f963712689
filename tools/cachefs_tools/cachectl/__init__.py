"""cachectl: shows and controls the node's cache from the command line.

It queries the daemon and never touches a mount to answer, so it works while a mount hangs or is dead. The exit statuses
are `command_session.ExitStatus`.
"""

from cachefs_tools.quiet_imports import quiet_imports

with quiet_imports():
    import click

    import cachefs
    from cachefs_tools.cachectl.bench import bench
    from cachefs_tools.cachectl.cluster import cluster, drain, ring, scale_hint
    from cachefs_tools.cachectl.content import evict, ls, pin, unpin, verify, warmup, warmups
    from cachefs_tools.cachectl.dataset import dataset
    from cachefs_tools.cachectl.debug_bundle import debug_bundle
    from cachefs_tools.cachectl.doctor import doctor
    from cachefs_tools.cachectl.index import index
    from cachefs_tools.cachectl.job import job, stalls
    from cachefs_tools.cachectl.mount_points import info, mount, umount
    from cachefs_tools.cachectl.sched import scale, sched
    from cachefs_tools.cachectl.stats import stats
    from cachefs_tools.cachectl.status import errors, log_level, mounts, reload, status
    from cachefs_tools.cachectl.top.command import top
    from cachefs_tools.cachectl.usage import MainGroup, help_command


SECTIONS = {
    "See": (status, top, mounts, stats, errors, stalls, help_command),
    "Data": (dataset, ls, info, warmup, warmups, pin, unpin, evict, mount, umount, index),
    "Jobs": (job, sched),
    "Cluster": (cluster, ring, drain, scale, scale_hint),
    "Repair and tune": (doctor, verify, debug_bundle, bench, reload, log_level),
}


@click.group(
    cls=MainGroup,
    sections=SECTIONS,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(cachefs.__version__, prog_name="cachectl")
@click.option("--socket", metavar="PATH", help="Socket of the daemon; may stand behind COMMAND too.")
def main(socket: str | None) -> None:
    """Show and steer the cache daemon of this node.

    The exit status is 0: done; 1: failed; 2: wrong usage; 3: no daemon answers; 4: done, but not completely (blocks
    could not be warmed, or damage was repaired); 130: interrupted.
    """
