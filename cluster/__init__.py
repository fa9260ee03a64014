"""Sites, jobs and schedulers. Standard library only, so that it starts at once on any login node.

The names below are imported when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cluster import kubernetes as kubernetes
    from cluster import local as local
    from cluster import slurm as slurm
    from cluster.job import Job as Job
    from cluster.job import JobSpec as JobSpec
    from cluster.job import JobStatus as JobStatus
    from cluster.record import ConfigError as ConfigError
    from cluster.site import Fact as Fact
    from cluster.site import Site as Site
    from cluster.state import JobError as JobError
    from cluster.state import JobState as JobState
    from cluster.state import StaleAttemptError as StaleAttemptError
    from cluster.submission import submit as submit

_MODULES = {
    "job": ("Job", "JobSpec", "JobStatus"),
    "record": ("ConfigError",),
    "site": ("Fact", "Site"),
    "state": ("JobError", "JobState", "StaleAttemptError"),
    "submission": ("submit",),
}
_BACKENDS = ("kubernetes", "local", "slurm")
_HOME = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"cluster.{_HOME[name]}"), name)
    if name in _BACKENDS:
        return import_module(f"cluster.{name}")
    raise AttributeError(f"module 'cluster' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME, *_BACKENDS])
