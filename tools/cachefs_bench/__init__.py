"""Benchmarks, demos and the lab: programs of developers, in a distribution of their own, `cachefs-bench`.

May import all other import packages; nothing of `cachefsd` imports this one. The modules of this package are the
command `cachefs-bench` (`cli`), its benchmarks, and the cluster demo.
"""
