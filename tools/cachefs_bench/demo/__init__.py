"""cachefs-demo: one training loop with four data sources, and a daemon that is killed in the middle of an epoch.

Start with `runs` (the plot), `training` (the loop, a process of its own), `stage` (origin and nodes). May import
cachefs_bench.lab and code shared by all commands. Nothing imports it.
"""
