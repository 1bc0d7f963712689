"""cachectl: shows and steers the node's cache from the command line.

It asks the daemon and never touches a mount to answer, so it works while a mount hangs or is dead. The exit statuses
are `command_session.ExitStatus`.
"""

from typing import Final

from cachefs_tools.quiet_loading import quiet_loading

with quiet_loading():
    import click

    import cachefs
    from cachefs_tools.cachectl.usage import MainGroup

# Heading -> command -> module of this package that has it. A command loads its own module, and not those of others.
SECTIONS: Final = {
    "See": {
        "status": "status", "top": "top.command", "mounts": "status", "stats": "stats", "errors": "status",
        "stalls": "job", "help": "usage",
    },
    "Data": {
        "dataset": "dataset", "ls": "content", "info": "info", "warmup": "content", "warmups": "warmups",
        "pin": "content", "unpin": "content", "evict": "content", "mount": "mount_points", "umount": "mount_points",
        "index": "index",
    },
    "Jobs": {"job": "job", "sched": "sched"},
    "Cluster": {
        "cluster": "cluster", "ring": "ring", "drain": "drain", "scale": "sched", "scale-hint": "scale_hint",
    },
    "Repair and tune": {
        "doctor": "doctor", "verify": "content", "debug-bundle": "debug_bundle", "bench": "bench",
        "reload": "settings", "log-level": "settings",
    },
}  # fmt: skip


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
