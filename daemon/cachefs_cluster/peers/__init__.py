"""The data plane: transfers blocks between nodes.

Server processes of their own serve blocks to other nodes; threads of the daemon receive blocks from them. Callers
choose which peer to ask for which block. May import membership and section.
"""
