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
html_show_copyright = False
html_last_updated_fmt = None
html_use_index = False


def add_navigation(_app: Sphinx, name: str, content: list[str]) -> None:
    """The home page has the tables of contents behind its text, hidden: the theme shows them beside each page. Pages of
    a directory with a README.md are below that one."""
    if name == root_doc:
        for reader in navigation.readers():
            content[0] += toctree(reader.name, [page for page in reader.pages if above(page) is None])
    else:
        below = [page for reader in navigation.readers() for page in reader.pages if above(page) == f"{name}.md"]
        if below:
            content[0] += toctree("", below)


def above(page: str) -> str | None:
    """The README.md of the page's directory, where that is a page too and another one."""
    readme = f"{page.rpartition('/')[0]}/README.md"
    listed = any(readme in reader.pages for reader in navigation.readers())
    return readme if listed and readme != page else None


def toctree(caption: str, pages: list[str]) -> str:
    """MyST's directive, hidden."""
    lines = [":hidden:", *([f":caption: {caption}"] if caption else []), ":maxdepth: 1", ""]
    names = [f"/{page.removesuffix('.md')}" for page in pages]
    return "\n".join(["\n```{toctree}", *lines, *names, "```", ""])


def setup(app: Sphinx) -> None:
    app.connect("source-read", add_navigation)
