"""The configuration of a deployment: the YAML schema, its loader, and the options of one instance."""

from epd_serve.config.gateway import GatewayConfig, MediaConfig
from epd_serve.config.load import ConfigError, change_config, load_config, parse_config
from epd_serve.config.model_files import DEMO_MODEL, model_path
from epd_serve.config.options import InstanceOptions, decode_graph_sizes
from epd_serve.config.schema import DeploymentConfig, deployment_schema
from epd_serve.config.sections import (
    InstancesConfig,
    InstanceSettings,
    KVTransferConfig,
    MooncakeConfig,
    ShapeConfig,
)

__all__ = [
    "DEMO_MODEL",
    "ConfigError",
    "DeploymentConfig",
    "GatewayConfig",
    "InstanceOptions",
    "InstanceSettings",
    "InstancesConfig",
    "KVTransferConfig",
    "MediaConfig",
    "MooncakeConfig",
    "ShapeConfig",
    "change_config",
    "decode_graph_sizes",
    "deployment_schema",
    "load_config",
    "model_path",
    "parse_config",
]
