"""cachectl ring: the share of blocks of each home node, and the blocks that a change of the nodes would move."""

import click

from cachefs.messages import Empty
from cachefs.rpc import CLUSTER
from cachefs_tools.cachectl.command_session import CommandSession, with_session


@click.command()
@click.option(
    "--diff",
    "changes",
    multiple=True,
    metavar="CHANGE",
    help="What would move if a node joined (+NAME, +NAME:WEIGHT or +NAME:WEIGHT:ZONE) or left (-NAME). May be given "
    "several times. Without a weight, a node that joins has the average one.",
)
@with_session
def ring(session: CommandSession, changes: tuple[str, ...]) -> None:
    """Show which part of all blocks each node is the home of.

    A block's home fetches it from the origin, and keeps it unless a published job reads it elsewhere sooner. SHARE is
    what the node's weight says, and HOMES what it is with 131,072 blocks. This command changes nothing.
    """
    found = session.call(CLUSTER, Empty())
    from cachefs_tools.cachectl import ring_tables  # numpy takes 0.1 s, which would delay every other command

    document, lines = ring_tables.diff_output(found, changes) if changes else ring_tables.shares_output(found)
    session.print_result(document, *lines)
