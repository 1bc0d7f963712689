"""What `cachefs run` has said on a job's stderr."""


def complaints(stderr: str) -> list[str]:
    """Lines about problems, and about loaders that are not understood. All of them say that the job goes on."""
    lines = [line for line in stderr.splitlines() if line.startswith("cachefs:")]
    return [line for line in lines if "the job goes on" in line or "all else is published" in line]
