from cachefs.sizes import Share, format_size, parse_share, parse_size

__all__ = ["Share", "format_size", "parse_share", "parse_size"]
