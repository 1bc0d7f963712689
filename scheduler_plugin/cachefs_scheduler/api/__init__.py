"""Answers calls of cachectl and of schedulers."""
