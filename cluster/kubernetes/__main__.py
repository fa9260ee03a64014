"""What the pods of a job note in the run directory. Standard library only.

python -m cluster.kubernetes begin RUN_DIR NAMESPACE JOB  the first pod starts an attempt: its
number python -m cluster.kubernetes end RUN_DIR ATTEMPT          it has ended well
python -m cluster.kubernetes stop RUN_DIR                 a pod is told to end: save and stop
"""

import sys
from pathlib import Path

from cluster.attempts import take_over
from cluster.outcome import USELESS_TO_RETRY, AttemptOutcome, write_end
from cluster.state import JobError, SchedulerJob, ask, read_asked


def main(words: list[str]) -> int:
    """Returns 0 when the run directory has taken the note."""
    try:
        match words:
            case ["begin", run_dir, namespace, job_id]:
                job = SchedulerJob(scheduler="kubernetes", id=job_id, config=f"/{namespace}")
                print(take_over(Path(run_dir), job))
            case ["end", run_dir, attempt]:
                end = AttemptOutcome(0, "all ranks of the first pod ended with code 0")
                write_end(Path(run_dir), int(attempt), end)
            case ["stop", run_dir]:
                (Path(run_dir) / "control" / "stopped").touch()
                if read_asked(Path(run_dir), "stop") is None:
                    ask(Path(run_dir), "stop", by_person=False)  # whose job may go on after it
            case _:
                print(__doc__, file=sys.stderr)
                return 2
    except JobError as error:
        print(error, file=sys.stderr)
        return USELESS_TO_RETRY
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
