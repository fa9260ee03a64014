"""What the first pod of a job notes in the run directory. Standard library only.

python -m cluster.kubernetes begin RUN_DIR ATTEMPT NAMESPACE JOB    this attempt starts now
python -m cluster.kubernetes end RUN_DIR ATTEMPT                    it has ended well
"""

import sys
import time
from pathlib import Path

from cluster.outcome import write_end
from cluster.state import JobError, JobState, SchedulerJob, read_state, update_state


def begin(run_dir: Path, attempt: int, namespace: str, job_id: str) -> None:
    """Notes in the run directory that an attempt starts; refused when a newer one owns it."""
    state = read_state(run_dir)
    known = state.scheduler_job if state else None  # with the context, which only whoever submits can know
    here = SchedulerJob(scheduler="kubernetes", id=job_id, config=f"/{namespace}")
    job = known if known and known.id == job_id else here
    reason = "pods run, no step yet"
    update_state(
        run_dir, attempt=attempt, state=JobState.STARTING, reason=reason, heartbeat=time.time(), scheduler_job=job
    )


def main(words: list[str]) -> int:
    """Returns 0 when the run directory has taken the note."""
    try:
        match words:
            case ["begin", run_dir, attempt, namespace, job_id]:
                begin(Path(run_dir), int(attempt), namespace, job_id)
            case ["end", run_dir, attempt]:
                reason = "all ranks of the first pod ended with code 0"
                write_end(Path(run_dir), attempt=int(attempt), rc=0, reason=reason)
            case _:
                print(__doc__, file=sys.stderr)
                return 2
    except (JobError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
