"""Rendezvous of pods before their torchrun agents start, with pods simulated as processes of this
machine.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from cluster.kubernetes import meeting
from cluster.ports import reserve_port
from cluster.state import JobState, read_exit, read_state, update_state


def free_port() -> int:
    with reserve_port() as reserved:
        return reserved.getsockname()[1]


def pod(
    run_dir: Path, port: int, num_pods: int, index: int, limit_s: float, address: str = "localhost"
) -> subprocess.Popen:
    """Starts the process of one pod. The process waits at most `limit_s` seconds for the other
    pods, less than in a real pod.
    """
    program = (
        "import sys; from cluster.kubernetes import meeting, __main__ as main;"
        f"meeting.wait_for_pods.__defaults__ = meeting.join_first_pod.__defaults__ = ({limit_s},);"
        "sys.exit(main.main(sys.argv[1:]))"
    )
    words = ["meet", run_dir, address, port, num_pods, index, *([] if index else [1])]
    return subprocess.Popen(
        [sys.executable, "-c", program, *map(str, words)], stderr=subprocess.DEVNULL
    )


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_pods_find_each_other_in_any_start_order(tmp_path, address):
    if ":" in address and not Path("/proc/net/if_inet6").is_file():
        pytest.skip("this machine has no IPv6")
    update_state(tmp_path, attempt=1, state=JobState.STARTING)
    port = free_port()
    pods = [pod(tmp_path, port, 3, index, 60.0, address) for index in (2, 0, 1)]
    assert [each.wait(60) for each in pods] == [0, 0, 0]
    state = read_state(tmp_path)
    assert state is not None and state.reason == "3 pods found each other; ranks start"
    with reserve_port(port) as reserved:
        assert reserved.getsockname()[1] == port, "the agent can listen there at once"


def test_exit_report_names_missing_pods(tmp_path):
    update_state(tmp_path, attempt=1, state=JobState.STARTING)
    port = free_port()
    pods = [pod(tmp_path, port, 4, index, 6.0) for index in (0, 1)]
    assert [each.wait(60) for each in pods] == [1, 1]
    report = read_exit(tmp_path)
    expected = f"pods 2, 3 of 4 did not reach the first pod at localhost:{port} within 6 s"
    assert report is not None and report.reason.startswith(expected)


def test_unresolvable_first_pod_is_reported():
    problem = meeting.join_first_pod(("run-0.run.invalid", 29500), 2, limit_s=1.0)
    assert problem is not None
    for words in ("pod 2 on", "run-0.run.invalid:29500", "cannot be looked up", "headless Service"):
        assert words in problem
