"""What Prometheus is told of the node: one table of all metrics, what their values are now, and their text.

May import cachefs_daemon.node and everything below it.
"""
