"""The settings of origins, from the configuration."""

from cachefs_daemon.config import Config
from cachefs_daemon.origin.base import OriginSettings


def origin_settings(config: Config) -> OriginSettings:
    connect_timeout, read_timeout = config.origin_timeouts
    return OriginSettings(
        max_connections=config.origin.max_connections,
        connect_timeout=connect_timeout,
        hedge_share=config.origin.hedged,
        max_request=min(config.origin.max_request, config.origin.max_bytes_in_flight),
        max_listing=config.origin.max_listing,
        max_pages=config.origin.max_pages,
        read_timeout=read_timeout,
        block_size=config.daemon.block_size,
        file_roots=tuple(str(path) for path in config.security.file_roots),
        follow_symlinks=config.security.follow_symlinks,
    )
