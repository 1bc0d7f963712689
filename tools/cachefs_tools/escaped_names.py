"""Names of files, datasets and mounts as one safe line of a terminal."""

import os


def escape_name(path: bytes | str) -> str:
    """Return a name as one safe line. Control and unprintable characters are escaped."""
    text = os.fsdecode(path)
    return "".join(character if character.isprintable() else _escape_character(character) for character in text)


def _escape_character(character: str) -> str:
    if "\udc80" <= character <= "\udcff":
        return f"\\x{ord(character) - 0xDC00:02x}"
    return character.encode("unicode_escape").decode()
