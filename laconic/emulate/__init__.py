"""Emulates hosts with slow links inside one machine: network namespaces on a bridge, shaped by the Linux kernel."""

from laconic.emulate.hosts import hosts_behind as hosts_behind
from laconic.emulate.links import Link as Link
from laconic.emulate.links import parse_links as parse_links
from laconic.emulate.network import EmulationError as EmulationError
from laconic.emulate.network import Host as Host
from laconic.emulate.network import Network as Network
