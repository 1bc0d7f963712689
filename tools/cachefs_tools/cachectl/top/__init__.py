"""`cachectl top`: a live, full-screen view of the node.

`picture` gets pictures of the daemon, `history` derives rates, `frame` renders lines of text, and `screen` shows
the lines and handles keys. May import what the other commands of cachectl may.
"""
