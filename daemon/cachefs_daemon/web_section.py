"""[web] of the configuration: where people look at the node in a browser."""

from cachefs_daemon.local_listen import LocalListen
from cachefs_daemon.section import Section


class WebSection(Section):
    """[web]: the page for people."""

    listen: LocalListen = ""
