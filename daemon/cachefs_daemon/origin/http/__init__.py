"""An HTTP/1.1 client for GETs of objects, which takes less processor time than a general one.

Knows no kind of store.
"""
