"""The daemon's API for mounts, jobs and cachectl: the gRPC server, and a method for each call.

May import cachefs_daemon.node and everything below it.
"""
