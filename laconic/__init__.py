"""laconic: data-parallel training over slow networks. Train together, talk less."""

from laconic.comm import Comm as Comm
from laconic.comm import PeerError as PeerError
from laconic.launch import WorkerFailed as WorkerFailed
from laconic.launch import spawn as spawn
from laconic.method import Method as Method
from laconic.method import Replica as Replica
from laconic.method import state as state
from laconic.methods import ADPSGD as ADPSGD
from laconic.methods import METHODS as METHODS
from laconic.methods import QSGD as QSGD
from laconic.methods import A2CiD2 as A2CiD2
from laconic.methods import AllReduce as AllReduce
from laconic.methods import Divisible as Divisible
from laconic.methods import EfficientAdam as EfficientAdam
from laconic.methods import LocalSGD as LocalSGD
from laconic.version import __version__ as __version__
from laconic.worker import Worker as Worker
