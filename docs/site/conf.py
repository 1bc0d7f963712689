"""Sphinx's configuration: the Markdown pages of this repository as a site. `make docs` builds it in build/docs."""

import sys
from pathlib import Path

from sphinx.application import Sphinx

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]

import navigation  # noqa: E402

import cachefs  # noqa: E402

project = "cachefs"
author = "the cachefs authors"
version = release = cachefs.__version__
html_title = f"cachefs {release}"

extensions = ["myst_parser"]
# The repository is the source, so that links between docs/ and CHANGELOG.md are the same here and on a code server.
root_doc = navigation.HOME.removesuffix(".md")
include_patterns = [navigation.HOME, *(page for reader in navigation.readers() for page in reader.pages)]
exclude_patterns = [".*", "build", "dist", "tests", "**/__pycache__"]
myst_heading_anchors = 4
highlight_language = "none"
smartquotes = False

html_theme = "furo"
html_extra_path = ["start"]
html_copy_source = False
html_show_sourcelink = False
html_last_updated_fmt = None
html_use_index = False


def add_navigation(_app: Sphinx, name: str, content: list[str]) -> None:
    """The home page has the tables of contents behind its text, hidden: the theme shows them beside each page."""
    if name != root_doc:
        return
    for reader in navigation.readers():
        pages = "\n".join(f"/{page.removesuffix('.md')}" for page in reader.pages)
        content[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {reader.name}\n:maxdepth: 1\n\n{pages}\n```\n"


def setup(app: Sphinx) -> None:
    app.connect("source-read", add_navigation)
