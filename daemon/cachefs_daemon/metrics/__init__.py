"""The node's metrics for Prometheus: the table of all metrics, their present values, and their text.

May import cachefs_daemon.node and everything below it.
"""
