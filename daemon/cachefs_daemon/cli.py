"""The former entry point of `cachefsd`, for scripts of installations from before `cachefsd.command`."""

from importlib import import_module

main = import_module("cachefsd.command").main
