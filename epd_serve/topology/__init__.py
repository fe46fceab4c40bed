"""The stages that run together and their devices: the topology notation, its placement and its picture."""

from epd_serve.topology.draw import draw, explain
from epd_serve.topology.notation import Group, Member, Topology, TopologyError, parse_topology
from epd_serve.topology.placement import InstancePlacement, place
from epd_serve.topology.role_switch import RoleSwitch, SwitchState

__all__ = [
    "Group",
    "InstancePlacement",
    "Member",
    "RoleSwitch",
    "SwitchState",
    "Topology",
    "TopologyError",
    "draw",
    "explain",
    "parse_topology",
    "place",
]
