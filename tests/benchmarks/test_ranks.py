"""The benchmarks of many ranks, at sizes that are quick: every row is measured, and the kit's
way does less.
"""

from pathlib import Path

from kit.plan import Plan
from tests.benchmarks.groups import measure
from tests.benchmarks.planning import seconds


def test_groups_are_measured_both_ways(tmp_path: Path) -> None:
    rows = measure(tmp_path, 12)
    before, lazy = rows[:4], rows[4:]
    assert [row.name.partition(": ")[2] for row in before] == [
        row.name.partition(": ")[2] for row in lazy
    ]
    assert (
        all(row.ok for row in lazy[:2])
        and lazy[0].value < before[0].value
        and before[1].value >= 12
    )


def test_a_plan_that_is_kept_costs_less(tmp_path: Path, llama_spec) -> None:
    plan = Plan(
        tensor_parallel=2, pipeline_parallel=4, data_parallel=2, zero_stage=1, global_batch_size=4
    )
    found = seconds(tmp_path, 2, is_before=False, spec=llama_spec, plan=plan)
    assert found["ranks"] == 8 and found["items"] > 8 * 3 and found["bytes"] > 0
    assert found["seconds"][1] < found["seconds"][0]
