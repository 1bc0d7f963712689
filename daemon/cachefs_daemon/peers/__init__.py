"""The data plane: blocks from node to node, served by processes of their own and received by threads of the daemon.

It decides nothing about which peer is asked for which block. May import cluster and runtime.
"""
