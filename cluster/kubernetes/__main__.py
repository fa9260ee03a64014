"""Commands by which the pods of a job write its progress into the run directory.

Standard library only.

python -m cluster.kubernetes begin RUN_DIR NAMESPACE JOB
    begins an attempt and prints its number; run by the first pod
python -m cluster.kubernetes meet RUN_DIR ADDRESS PORT NUM_PODS INDEX [ATTEMPT]
    waits until all pods have found each other; run by each pod, by the first one with ATTEMPT
python -m cluster.kubernetes watch RUN_DIR ATTEMPT PID
    writes heartbeats until the first step or the end of the pod script PID; run by the first pod
python -m cluster.kubernetes end RUN_DIR ATTEMPT
    records that the attempt has ended without an error; run by the first pod
python -m cluster.kubernetes stop RUN_DIR
    requests that all ranks save and stop; run by each pod that Kubernetes ends
"""

import contextlib
import os
import sys
import time
from pathlib import Path

from cluster.attempts import USELESS_TO_RETRY, AttemptOutcome, take_over, write_end
from cluster.directory_handle import retry_disk
from cluster.heartbeats import StartWatch
from cluster.kubernetes import meeting
from cluster.state import JobError, SchedulerJob, read_pending_request, write_request


def main(words: list[str]) -> int:
    """Runs one of the commands above. Returns the exit code of this process: 0 if the progress was
    written.
    """
    try:
        match words:
            case ["begin", run_dir, namespace, job_id]:
                job = SchedulerJob(scheduler="kubernetes", id=job_id, config=f"/{namespace}")
                # The pod's script reads the attempt number from standard output.
                with contextlib.redirect_stdout(sys.stderr):
                    number = retry_disk(lambda: take_over(Path(run_dir), job))
                print(number)
            case ["meet", run_dir, address, port, num_pods, index, *attempt]:
                place = (address, int(port))
                return _meet(Path(run_dir), place, int(num_pods), int(index), attempt)
            case ["watch", run_dir, attempt, script_pid]:
                start = StartWatch(Path(run_dir), int(attempt))
                while not start.is_over and os.getppid() == int(script_pid):
                    start.beat()
                    time.sleep(1.0)
            case ["end", run_dir, attempt]:
                end = AttemptOutcome(0, "all ranks of the first pod ended with code 0")
                retry_disk(lambda: write_end(Path(run_dir), int(attempt), end))
            case ["stop", run_dir]:
                retry_disk(lambda: _request_stop(Path(run_dir)))
            case _:
                print(__doc__, file=sys.stderr)
                return 2
    except JobError as error:
        print(error, file=sys.stderr)
        return USELESS_TO_RETRY
    return 0


def _request_stop(run_dir: Path) -> None:
    """Requests that all ranks save and stop. The request does not count as a user's, so the job may
    continue afterwards.
    """
    (run_dir / "control" / "stopped").touch()
    if read_pending_request(run_dir, "stop") is None:
        write_request(run_dir, "stop", by_person=False)


def _meet(
    run_dir: Path, place: tuple[str, int], num_pods: int, index: int, attempt: list[str]
) -> int:
    """Waits until all pods of the job have connected to the first pod. Returns exit code 0 if all
    have connected, 1 otherwise.
    """
    if index:
        problem = meeting.join_first_pod(place, index)
    else:
        problem = meeting.wait_for_pods(run_dir, int(attempt[0]), place, num_pods)
        if problem:
            end = AttemptOutcome(1, problem)
            retry_disk(lambda: write_end(run_dir, int(attempt[0]), end))
    if problem:
        print(problem, file=sys.stderr)
    return 1 if problem else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
