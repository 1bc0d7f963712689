"""`cachefs-bench peers`: blocks from node to node."""

import json
from typing import Any

import click

from cachefs_bench import peers
from cachefs_bench.peers import PeerLoad


@click.command("peers")
@click.option("--seconds", default=1.0, show_default=True, type=click.FloatRange(min=0.2), help="Of each turn.")
@click.option(
    "--turns", default=9, show_default=True, type=click.IntRange(min=1), help="How often each way has a turn."
)
@click.option(
    "--singles", default=2000, show_default=True, type=click.IntRange(min=2), help="Blocks asked for one at a time."
)
@click.option(
    "--megabits", default=1000, show_default=True, type=click.IntRange(min=0),
    help="Of the link of three nodes to one; 0 leaves that out.",
)  # fmt: skip
@click.option("--window", default=0, help="Bytes that may be on the way.  [default: the window is learnt]")
@click.option("--only", multiple=True, type=click.Choice(peers.PARTS), help="Only this; several times.")
@click.option("--loopback", is_flag=True, help="On the loopback address in place of network namespaces: needs no root.")
def peers_command(only: tuple[str, ...], **options: Any) -> None:
    """Measure blocks from node to node: of 110 KB and of 4 MiB, one pair, without and with TLS.

    In the same run, iperf3 (Debian package iperf3) shows what the network does, and a plain copy over TLS with as many
    connections what encryption leaves of it. Then three nodes give to one over a slow link.
    """
    load = PeerLoad(**options)
    click.echo(json.dumps(peers.measure(load, only or peers.PARTS), indent=2))
