"""Foresees the order in which a sampler will give its samples, or reads that order from its iterator."""
