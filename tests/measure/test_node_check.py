"""The check at the start of a job finds slow nodes. The test simulates nodes with processes of one
machine.
"""

import os
import time
from pathlib import Path

import pytest
import torch

from kit.measure import node_check
from kit.measure.node_check import NodeRate, NodeReport, measure_nodes, record_nodes
from tests.support.workers import run_ranks

CPU = torch.device("cpu")


def check_with_fault(ranks_per_node, slow_compute=(), slow_link=()):
    """Runs the node check on one rank. Nodes in `slow_compute` have slow matrix products, nodes in
    `slow_link` have slow sends.
    """
    rank = int(os.environ["RANK"]) if "RANK" in os.environ else torch.distributed.get_rank()
    node = rank // ranks_per_node
    os.environ["SLURMD_NODENAME"] = f"node{node}"
    rates = {True: 1e9, False: 1e10}
    node_check.measure_gemm_flops_per_s = lambda dtype, seconds: rates[node in slow_compute]
    send = torch.distributed.batch_isend_irecv

    def slow_send(operations):
        # Every send is delayed, so that the load of this machine has little effect on the measured
        # time.
        time.sleep(0.5 if node in slow_link else 0.05)
        return send(operations)

    if slow_link:
        torch.distributed.batch_isend_irecv = slow_send
    return measure_nodes(CPU, "fp32")


def test_slow_nodes_are_named_with_cause():
    reports = run_ranks(5, check_with_fault, 1, (1,), (3,))
    assert all(report == reports[0] for report in reports), "all ranks must agree"
    assert [node.node for node in reports[0].nodes] == [f"node{i}" for i in range(5)]
    compute, link = reports[0].slow
    assert compute.startswith("node1 computes at 10%")
    assert link.startswith("node3 sends at")


def test_healthy_nodes_are_not_reported_as_slow():
    report = run_ranks(4, check_with_fault, 2)[0]
    assert (report.num_ranks, len(report.nodes)) == (4, 2)
    assert report.slow == []
    assert min(report.all_reduce_bytes_per_s, *(node.bytes_per_s for node in report.nodes)) > 1e6


def real_check(directory):
    report = measure_nodes(CPU, "fp32")
    if torch.distributed.get_rank() == 0:
        record_nodes(report, directory)
    return report


def test_node_check_is_measured_and_recorded(tmp_path: Path):
    report = run_ranks(2, real_check, tmp_path)[0]
    assert NodeReport.read(tmp_path / "node_check.json") == report
    (node,) = report.nodes
    assert node.matmul_flops_per_s > 1e8 and node.bytes_per_s is None


def test_none_of_two_nodes_is_reported_as_slow():
    """With only two nodes there is no majority that shows which one is slow."""
    nodes = tuple(NodeRate(node=str(rate), matmul_flops_per_s=rate) for rate in (1e9, 1e12))
    assert NodeReport(dtype="fp32", num_ranks=2, nodes=nodes).slow == []


@pytest.mark.parametrize("num_nodes", range(1, 9))
def test_each_node_pairs_with_both_neighbours(num_nodes):
    """A node sends in at most one pair of nodes per round."""
    rounds = node_check._rounds(num_nodes)
    for pairs in rounds:
        talking = [node for pair in pairs for node in pair]
        assert len(talking) == len(set(talking))
    for node in range(num_nodes):
        partners = {a + b - node for pairs in rounds for a, b in pairs if node in (a, b)}
        neighbours = {(node + 1) % num_nodes, (node - 1) % num_nodes}
        assert partners == neighbours - {node}
