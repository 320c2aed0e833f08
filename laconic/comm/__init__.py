"""Communication between workers. Methods use the network, threads and the clock only through a `Comm`.

comm.py defines its verbs; solo.py implements them for one worker, distributed.py over torch.distributed, and staged.py
for tensors of a device over channels of host memory.
"""

from laconic.comm.comm import Comm as Comm
from laconic.comm.comm import PeerError as PeerError
from laconic.comm.comm import Pending as Pending
from laconic.comm.connect import connect as connect
from laconic.comm.connect import expected_size as expected_size
from laconic.comm.gossip import Dialogue as Dialogue
from laconic.comm.gossip import Gossip as Gossip
from laconic.comm.meter import Counts as Counts
from laconic.comm.meter import Meter as Meter
from laconic.comm.solo import Solo as Solo
