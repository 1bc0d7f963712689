"""Simulation of a cluster in one process, on virtual time and from a seed: see docs/simulation.md."""
