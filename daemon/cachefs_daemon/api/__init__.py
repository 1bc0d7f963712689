"""The daemon's door for mounts, jobs and cachectl: the gRPC server and what answers each call.

May import cachefs_daemon.node and everything below it.
"""
