"""The live view: every rank posts a report once a second to the job's store, and rank 0 serves them all."""

from __future__ import annotations

import errno
import socket
import threading

from laconic.log import logger, rank_filter
from laconic.tracking.metrics import Tracked
from laconic.tracking.report import LONGEST_TEXT, Overview, Rates, Report
from laconic.tracking.server import Server, parse_address

REPORT_SECONDS = 1.0
GOODBYE_SECONDS = 1.0  # for the last report; a store that is gone must not delay this rank's own error


class Dashboard:
    """One rank's part of the live view. Whatever fails after the start is logged once, and training goes on.

    Args:
        worker: whose state is reported.
        dashboard: a port, or HOST:PORT, at which rank 0 serves.

    Raises:
        ValueError: rank 0 cannot listen there.
    """

    def __init__(self, worker: Tracked, dashboard: int | str) -> None:
        self._worker = worker
        self._overview = Overview("", worker.comm.size)
        self._server: Server | None = None
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="laconic-dashboard", daemon=True)
        self._state, self._failure, self._beat = "training", "", 0
        self._old_problems = rank_filter.problems  # of before this worker
        self._rates = Rates()
        if worker.comm.rank == 0:
            self._server = _listen(dashboard, self._overview)

    @property
    def url(self) -> str | None:
        """Where the page is, on rank 0."""
        return self._server.url if self._server is not None else None

    def start(self) -> None:
        """Starts to report, and on rank 0 to serve. The worker is complete."""
        self._bulletin = self._worker.comm.bulletin("dashboard")
        self._overview.method = type(self._worker.method).__name__
        self._thread.start()
        if self._server is not None:
            self._server.start()
            logger.info(f"live view at {self._server.url}")

    def close(self, error: BaseException | None) -> None:
        """Posts a last report and ends the threads, within seconds."""
        self._state = "finished" if error is None else "failed"
        self._failure = "" if error is None else f"{type(error).__name__}: {error}"
        self._ending.set()
        if self._thread.ident is not None:
            self._thread.join(GOODBYE_SECONDS)
        if self._server is not None:
            self._server.close()

    def _run(self) -> None:
        try:
            while True:
                is_last = self._ending.wait(REPORT_SECONDS if self._beat else 0.0)
                self._bulletin.post(self._report().to_text())
                if self._server is not None:
                    self._overview.add(self._bulletin.read())
                if is_last:
                    return
        except Exception as error:  # noqa: BLE001  the view must not stop training
            if not self._ending.is_set():
                logger.warning(
                    f"rank {self._worker.comm.rank}: the live view gets no more reports of this rank, training goes "
                    f"on: {type(error).__name__}: {error}"
                )

    def _report(self) -> Report:
        worker, tracking = self._worker, self._worker.tracking
        self._beat += 1
        problem = rank_filter.last_problem if rank_filter.problems > self._old_problems else ""
        totals = tracking.totals()
        self._rates.add(totals)
        doing = tracking.doing
        return Report(
            rank=worker.comm.rank,
            beat=self._beat,
            host=socket.gethostname(),
            state=self._state,
            step=worker.step,
            doing=doing[0] if doing else "computing" if self._state == "training" else "",
            doing_seconds=tracking.now() - doing[1] if doing else 0.0,
            **self._rates.read(),
            nbytes=worker.meter.nbytes_by_channel(),
            waited_seconds=totals["waited_seconds"],
            overhead_seconds=totals["overhead_seconds"],
            members=len(worker.comm.members),
            error=(self._failure or problem)[:LONGEST_TEXT],
        )


def _listen(dashboard: int | str, overview: Overview) -> Server:
    host, port = parse_address(dashboard)
    try:
        return Server((host, port), overview.status)
    except OSError as error:
        reasons = {
            errno.EADDRINUSE: f"port {port} is taken, perhaps by another job",
            errno.EACCES: f"port {port} needs root's rights",
            errno.EADDRNOTAVAIL: f"{host} is no address of this machine",
        }
        raise ValueError(
            f"dashboard={dashboard!r}: rank 0 cannot listen at {host}:{port}: "
            f"{reasons.get(error.errno or 0, str(error))}. Choose another port, or dashboard=0 for any free one "
            f"(worker.dashboard then says which)"
        ) from error
