"""The fetch process: downloads objects, verifies them, and writes them into room that the daemon has reserved.

It makes one attempt per object and leaves every failure to the daemon, so its death loses nothing. The daemon uses the
modules `frames` and `channel` too. May import origin and store.
"""
