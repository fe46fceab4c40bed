"""Prices of devices, from an operator's table."""

from __future__ import annotations

from pathlib import Path

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from epd_serve.cost.devices import DEVICE_SPECS, spec_of


def read_prices(path: Path | None) -> dict[str, float]:
    """Prices by device: HeteroServe's for two of them, over which a YAML file of ``name: price`` goes.

    Raises ValueError that names the file and what is wrong with it.
    """
    prices = {name: spec.price for name, spec in DEVICE_SPECS.items() if spec.price is not None}
    if path is None:
        return prices
    try:
        table = YAML(typ="safe", pure=True).load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"price table {path}: {error.strerror}") from error
    except (YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"price table {path}: no YAML: {error}") from error
    if not isinstance(table, dict):
        raise ValueError(f"price table {path}: expected lines such as 'a100: 16000'")
    for name, price in table.items():
        if isinstance(price, bool) or not isinstance(price, (int, float)) or not 0 < price < float("inf"):
            raise ValueError(f"price table {path}: {name} costs {price!r}; write a number above 0")
        prices[spec_of(str(name)).name] = float(price)
    return prices


def price_of(name: str, prices: dict[str, float]) -> float:
    """The price of one device. Raises ValueError for a device without a price."""
    key = spec_of(name).name
    if key not in prices:
        raise ValueError(f"{key} has no price; give a table with --prices, with a line such as '{key}: 10000'")
    return prices[key]
