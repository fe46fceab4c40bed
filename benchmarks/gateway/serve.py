"""Our gateway as the benchmark runs it: ``python -m benchmarks.gateway.serve PORT ACCESS_LOG NAME=URL ...``."""

from __future__ import annotations

import sys

from epd_serve.config import DeploymentConfig
from proxy.main import run_gateway


def main() -> None:
    port, access_log, *instances = sys.argv[1:]
    config = DeploymentConfig.model_validate(
        {"model": "demo", "topology": "E-P-D", "gateway": {"api_key": "benchmark", "access_log": access_log}}
    )
    pairs = [(name, url) for name, _, url in (one.partition("=") for one in instances)]
    run_gateway(config, pairs, "127.0.0.1", int(port))


if __name__ == "__main__":
    main()
