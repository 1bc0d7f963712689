"""The origin `file://`: a tree of files that the daemon reads in threads."""
