"""cachefs: a clairvoyant cache between training jobs and object storage, read as plain files."""

__version__ = "0.1.0"
