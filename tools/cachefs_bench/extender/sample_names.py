"""Names of the measurement's nodes and dataset."""

DATASET = "imagenet"


def node_name(number: int) -> str:
    """Return a node's name, in the style of clouds."""
    return f"gke-training-gpu-pool-{number:05}.europe-west4.internal"
