"""cachefs: a clairvoyant cache between training jobs and object storage, read as plain files.

Public names for training code: `publish` and `PublishedSampler` (see docs/publishing.md), the `Publication` that
`publish` returns, the `SamplerSpec` that it takes, and `pure_sampler`.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cachefs.planning.sequences.sampler_spec import SamplerSpec as SamplerSpec
    from cachefs.publishing.publication import Publication as Publication
    from cachefs.publishing.pure import pure_sampler as pure_sampler
    from cachefs.publishing.sampler import PublishedSampler as PublishedSampler
    from cachefs.publishing.sampler import publish as publish

__version__ = "0.3.0.dev0"

_PUBLIC = {
    "Publication": "cachefs.publishing.publication",
    "PublishedSampler": "cachefs.publishing.sampler",
    "SamplerSpec": "cachefs.planning.sequences.sampler_spec",
    "publish": "cachefs.publishing.sampler",
    "pure_sampler": "cachefs.publishing.pure",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use, since a mount and the daemon need none."""
    if name in _PUBLIC:
        from importlib import import_module

        return getattr(import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
