"""Data-parallel PyTorch training over slow networks.

Workers keep their model, optimizer and training loop. A method, chosen with one object, decides what they send to each
other and when:

>>> import torch
>>> import laconic
>>> model = torch.nn.Linear(20, 1)
>>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
>>> with laconic.Worker(model, optimizer, laconic.LocalSGD(period=8)) as worker:
...     for _ in range(20):
...         x = torch.randn(16, 20)
...         torch.nn.functional.mse_loss(model(x), x.sum(dim=1, keepdim=True)).backward()
...         optimizer.step()
...         optimizer.zero_grad()
>>> worker.step
20
"""

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
from laconic.methods import DiLoCo as DiLoCo
from laconic.methods import Divisible as Divisible
from laconic.methods import EfficientAdam as EfficientAdam
from laconic.methods import LocalSGD as LocalSGD
from laconic.simulate import simulate as simulate
from laconic.tracking import track as track
from laconic.version import __version__ as __version__
from laconic.worker import Worker as Worker
