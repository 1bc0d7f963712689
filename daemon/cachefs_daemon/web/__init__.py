"""The web page of the node: its files, its data as JSON, and the history for it.

May import cachefs_daemon.node and everything below it. It shows, field by field, only what every local user may see
with cachectl.
"""
