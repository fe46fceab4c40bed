"""Our gateway as the benchmark runs it: ``python -m benchmarks.gateway.serve PORT ACCESS_LOG NAME=URL ...``."""

from __future__ import annotations

import sys

from epd_serve.config import DeploymentConfig
from epd_serve.config.keys import hash_key
from proxy.main import run_gateway


def main() -> None:
    port, access_log, *instances = sys.argv[1:]
    keys = [{"name": "benchmark", "hash": hash_key("benchmark")}]
    config = DeploymentConfig.model_validate({"gateway": {"api_keys": keys, "access_log": access_log}})
    pairs = [(name, url) for name, _, url in (one.partition("=") for one in instances)]
    run_gateway(config, pairs, "127.0.0.1", int(port))


if __name__ == "__main__":
    main()
