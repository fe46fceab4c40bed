"""The transport and the feature store of an instance."""

from __future__ import annotations

from device.transport import TRANSPORTS
from epd_serve.config.options import InstanceOptions
from epd_serve.config.sections import MIN_SEGMENT_BYTES
from epd_serve.factories import as_it_is, factory
from epd_serve.transfer.embedded import EmbeddedTransport
from epd_serve.transfer.feature_store import EmbeddedFeatureStore, FeatureStore, StoreObserver
from epd_serve.transfer.mooncake import MooncakeOptions, StoreClient
from epd_serve.transfer.mooncake_store import MooncakeFeatureStore
from epd_serve.transfer.mooncake_transport import MooncakeTransport
from epd_serve.transfer.transport import Transport


def start_transport(options: InstanceOptions, device_type: str) -> Transport:
    """Raises ValueError where mooncake is asked for and missing, or does not reach the device's memory so."""
    if options.kv_transfer.transport == "mooncake":
        transport: Transport = MooncakeTransport(_mooncake_options(options, device_type))
    else:
        transport = EmbeddedTransport(
            options.host,
            options.kv_transfer.transport,
            _timeout_s(options),
            port=options.data_port,
            advertise=options.advertise,
        )
    return factory("transport", as_it_is)(transport)


def start_feature_store(
    options: InstanceOptions, transport: Transport, device_type: str, observe: StoreObserver
) -> FeatureStore:
    """Blocks until the store is there. Raises ValueError as above, or where its master does not answer.

    An instance that is meant to encode lends ``feature_store_bytes`` to a store that all share.
    """
    local = EmbeddedFeatureStore(transport, options.feature_store_bytes, observe)
    if options.feature_store == "embedded" or not (options.role.encodes or options.role.prefills):
        return local
    if options.mooncake.master is None:
        raise ValueError("feature_store mooncake needs the address of its master")
    segment_bytes = options.feature_store_bytes if options.role.encodes else 0
    if 0 < segment_bytes < MIN_SEGMENT_BYTES:
        raise ValueError(f"Mooncake Store takes no less than {MIN_SEGMENT_BYTES}; raise feature_store_bytes")
    mooncake = _mooncake_options(options, device_type)
    client = StoreClient(
        mooncake,
        options.mooncake.master,
        segment_bytes,
        engine=transport.engine if isinstance(transport, MooncakeTransport) else None,
    )
    return MooncakeFeatureStore(client, local, options.feature_store_bytes, mooncake, observe)


def _mooncake_options(options: InstanceOptions, device_type: str) -> MooncakeOptions:
    capability = TRANSPORTS[device_type]
    protocol = options.mooncake.protocol
    if protocol == "auto":
        protocol = capability.mooncake_protocols[0]  # type: ignore[assignment]
    if protocol not in capability.mooncake_protocols:
        raise ValueError(
            f"mooncake.protocol {protocol} does not reach memory of {device_type}; "
            f"write {' or '.join(capability.mooncake_protocols)}"
        )
    return MooncakeOptions(
        host=options.advertise or options.host,
        protocol=protocol,
        devices=options.mooncake.devices or "",
        staging_bytes=options.mooncake.staging_bytes,
        timeout_s=_timeout_s(options),
        alignment_bytes=capability.alignment_bytes,
        max_regions=capability.max_regions,
    )


def _timeout_s(options: InstanceOptions) -> float:
    """A write must end well before the lease of its target."""
    return options.lease_s / 4
