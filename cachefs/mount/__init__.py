"""The mount process (pyfuse3, trio): serves snapshots as a read-only tree, from the tiers of its node."""
