"""How workers talk: the verbs, the meter, and the ways to find each other."""

from laconic.comm.comm import Comm as Comm
from laconic.comm.comm import PeerError as PeerError
from laconic.comm.comm import Pending as Pending
from laconic.comm.connect import connect as connect
from laconic.comm.gossip import Dialogue as Dialogue
from laconic.comm.gossip import Gossip as Gossip
from laconic.comm.meter import Counts as Counts
from laconic.comm.meter import Meter as Meter
from laconic.comm.solo import Solo as Solo
