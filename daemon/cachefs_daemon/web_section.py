"""[web] of the configuration: the address of the node's web page."""

from cachefs_daemon.local_listen import LocalListen
from cachefs_daemon.section import Section


class WebSection(Section):
    """[web]: the web page of the node."""

    listen: LocalListen = ""
