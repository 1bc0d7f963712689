"""`cachectl top`: a live picture of the node, on a whole terminal.

`asking` gets pictures of the daemon, `history` makes rates of them, `frame` makes lines of text of these, and `screen`
shows the lines and takes keys. May import what the other commands of cachectl may.
"""
