"""epd-serve: multimodal LLM serving with separate Encode, Prefill and Decode instances."""

from importlib.metadata import version

__version__ = version("epd-serve")
