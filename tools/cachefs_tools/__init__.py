"""cachectl, the demo and the benchmarks."""
