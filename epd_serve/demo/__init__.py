"""The built-in demo model: a tiny vision-language model, measured in ``docs/reports/demo-model.md``."""

from pathlib import Path

__all__ = ["weights_dir"]


def weights_dir() -> Path:
    """Folder of the packaged demo weights, in the layout that `from_pretrained` reads."""
    return Path(__file__).parent / "weights"
