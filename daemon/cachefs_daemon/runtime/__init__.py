"""Helpers for all parts of the daemon: threads, the log of failures, periodic saving, clocks and limits.

Imports no other package of the daemon.
"""
