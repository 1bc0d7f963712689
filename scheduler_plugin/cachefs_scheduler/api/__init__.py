"""HTTP API for cachectl and schedulers."""
