"""cachefs-demo: one training loop, fed in four ways, and a daemon that is killed in the middle of an epoch.

Who reads first: `story` (what happens), `training` (the loop, a process of its own), `stage` (origin and nodes). It may
import cachefs_tools.lab and what commands of all kinds share. Nothing imports it.
"""
