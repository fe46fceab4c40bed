"""The built-in demo model: a tiny vision-language model, made and measured by ``benchmarks/demo``."""

from pathlib import Path

__all__ = ["weights_dir"]


def weights_dir() -> Path:
    """Folder of the packaged demo weights, in the layout that `from_pretrained` reads."""
    return Path(__file__).parent / "weights"
