"""The page that people look at in a browser: its files, what it asks, and what is remembered for it.

May import cachefs_daemon.node and everything below it. It tells, field by field, what every local user may ask by
cachectl, and nothing else.
"""
