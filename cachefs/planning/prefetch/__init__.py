"""Decides what to fetch before it is read, how far ahead, and how much at once.

May import cachefs.planning.sequences and .blocks.
"""
