"""Metrics of a worker, experiment trackers, and the live view.

metrics.py defines the keys, tracking.py measures, track.py and writers.py write to trackers. dashboard.py reports each
rank to rank 0, which serves a page (server.py, page.html) and Prometheus' format (prometheus.py); top.py shows the
same in a terminal.
"""

from laconic.tracking.dashboard import Dashboard as Dashboard
from laconic.tracking.server import parse_address as parse_address
from laconic.tracking.track import track as track
from laconic.tracking.tracking import Tracking as Tracking
