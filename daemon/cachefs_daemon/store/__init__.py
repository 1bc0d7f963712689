"""The blocks of this node on memory and disk: tiers of segments, the index, and recovery after a crash.

May import runtime and config; knows no datasets.
"""
