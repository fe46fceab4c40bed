"""The topology notation, and the placement of instances on devices."""

from epd_serve.topology.notation import Group, Member, Topology, TopologyError, parse_topology
from epd_serve.topology.placement import InstancePlacement, place

__all__ = [
    "Group",
    "InstancePlacement",
    "Member",
    "Topology",
    "TopologyError",
    "parse_topology",
    "place",
]
