"""What `cachefs run` has said on a job's stderr."""

# Ends the line that says so where a busy machine keeps the daemon from its answer for half a second.
UNANSWERED = "the daemon did not answer as the job began"


def complaints(stderr: str) -> list[str]:
    """Lines about problems, and about loaders that are not understood. All of them end with "the job continues"."""
    lines = [line for line in stderr.splitlines() if line.startswith("cachefs:")]
    return [line for line in lines if "the job continues" in line or "everything else is published" in line]
