"""The state of one run, read from its files, with all objects that views derive from the run."""

import threading
from pathlib import Path

from kit.monitor.actions import Actions
from kit.monitor.alerts import AlertMonitor
from kit.monitor.curves import Curves
from kit.monitor.ranks import RankTimes
from kit.monitor.speed import SpeedMonitor
from kit.run import Run
from kit.run.metrics import Metrics


class RunView:
    """A run with its curves, actions, alerts, expected speed and step times of ranks.

    A new attempt may have another plan and another number of steps, and a corrected site has
    another peak. In both cases a dashboard creates a new view, which replaces the old view.

    Args:
        run: the run, as its files describe it now.
        attempt: number of the attempt whose ranks are watched.
        site_written_at: result of the function `site_written_at` before `run` was opened.
        lock: lock of the dashboard. It is held wherever curves are read or extended.
        smoothing: weight of the past in the averages. It is ignored if `earlier` is given, whose
            smoothing is kept.
        earlier: view that this view replaces. The parsed rows, the requests of this viewer and the
            state of the alert rules are taken over from it.
    """

    def __init__(
        self,
        run: Run,
        attempt: int,
        site_written_at: float | None,
        lock: threading.RLock,
        *,
        smoothing: float = 0.9,
        earlier: "RunView | None" = None,
    ) -> None:
        self.run = run
        self.attempt = attempt
        self.site_written_at = site_written_at
        self.lock = lock
        if earlier is None:
            self.curves = Curves(run, smoothing)
            self.actions = Actions(run)
            self.alert_monitor = AlertMonitor(run)
            self.speed_monitor = SpeedMonitor(run, self.metrics)
        else:
            self.curves = Curves(run, earlier=earlier.curves)
            self.actions = Actions(run, earlier=earlier.actions)
            self.alert_monitor = AlertMonitor(run, earlier=earlier.alert_monitor)
            self.speed_monitor = SpeedMonitor(run, self.metrics, earlier=earlier.speed_monitor)
        self.ranks = RankTimes(run.directory, run.plan.num_devices, attempt)

    def metrics(self) -> Metrics:
        """Returns the steps that were read so far."""
        with self.lock:
            return self.curves.metrics()


def site_written_at(directory: Path) -> float | None:
    """Returns the unix time of the last change of a run's site.json, None if the file is missing.
    `kit bench --apply` corrects a peak in it.
    """
    try:
        return (directory / "site.json").stat().st_mtime
    except OSError:
        return None
