"""Sites, jobs and schedulers. Standard library only, so that it starts at once anywhere."""

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
