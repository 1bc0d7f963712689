"""The origins `gs://`, `az://`, `http(s)://` and `hf://`: one class that reads over HTTP with aiohttp, and a store for
each kind.
"""
