"""The built-in demo model: a tiny vision-language model and the scripts that make and measure it."""

from pathlib import Path

__all__ = ["weights_dir"]


def weights_dir() -> Path:
    """Folder of the packaged demo weights, in the layout that `from_pretrained` reads."""
    return Path(__file__).parent / "weights"
