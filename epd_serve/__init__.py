"""epd-serve: multimodal LLM serving with separate Encode, Prefill and Decode instances."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("epd-serve")
except PackageNotFoundError:  # in the Python of another environment, which has found the package by its path
    __version__ = "0"
