"""The scheduler with real parts."""
