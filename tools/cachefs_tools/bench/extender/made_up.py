"""What the nodes and the dataset of the measurement are called."""

DATASET = "imagenet"


def node_name(number: int) -> str:
    """Of a node, as clouds name them."""
    return f"gke-training-gpu-pool-{number:05}.europe-west4.internal"
