"""Simulates many workers in one process, in virtual time: the same user code and methods, without a network.

engine.py is the clock, network.py says how long messages take, comm.py implements the verbs.
"""

from laconic.simulate.network import Host as Host
from laconic.simulate.run import simulate as simulate
