"""State of one run, read from its files, with all objects that the views derive from it."""

import threading
from pathlib import Path

from kit.monitor.actions import Actions
from kit.monitor.alerts import AlertMonitor
from kit.monitor.curves import Curves
from kit.monitor.ranks import RankTimes
from kit.monitor.scores import score_series
from kit.monitor.speed import SpeedMonitor
from kit.run import Run
from kit.run.metrics import Metrics


class RunView:
    """A run with everything that a dashboard derives from it: curves, actions, alerts, expected
    speed and step times of ranks.

    A new attempt may have another plan and another number of steps. A correction of the site file
    changes the peak FLOP/s. In both cases the dashboard creates a new `RunView`, which replaces the
    old one.

    Args:
        run: the run, as its files describe it now.
        attempt: number of the attempt whose ranks are watched for slow ranks.
        site_written_at: unix time of the last change of site.json before `run` was opened, or None.
        lock: lock of the dashboard. A thread holds it while it reads or extends the curves.
        smoothing: weight of past values in the moving averages. It is ignored if `earlier` is
            given, since the smoothing of `earlier` is kept.
        earlier: `RunView` that this one replaces. Its parsed rows of metrics.jsonl, its requests to
            the job and the state of its alert rules are taken over.
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
        self._scores_written_at: int | None = None
        """Time of the last change of the folder of scores when the scores were last read."""

    def metrics(self) -> Metrics:
        """Returns the training steps that were read so far."""
        with self.lock:
            return self.curves.metrics()

    def read_new_scores(self) -> dict[str, dict[int, float]] | None:
        """Returns the scores of the run (`kit.monitor.scores.score_series`), or None if no score
        was written since the last call.
        """
        try:
            written_at = (self.run.directory / "eval").stat().st_mtime_ns
        except OSError:
            return None
        if written_at == self._scores_written_at:
            return None
        self._scores_written_at = written_at
        return score_series(self.run)


def site_written_at(directory: Path) -> float | None:
    """Returns the unix time of the last change of a run's site.json, or None if the file is
    missing. `kit bench --apply` changes the file when it corrects a peak.
    """
    try:
        return (directory / "site.json").stat().st_mtime
    except OSError:
        return None
