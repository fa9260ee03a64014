"""Five numbers that stand for the rest on the first page: a row of each of five results, misses included."""

from pathlib import Path

from kit.show.results import RESULTS, Results, Row, write_results

HEADLINES = {
    "train_speed": "kit / plain loop, 1 thread, llama-100m",
    "training_faults": "SIGKILL: steps lost beyond the last complete checkpoint",
    "validate": "never met, 0 runs: coverage of the 90 % interval",
    "monitor": "kernel CPU at 4 Hz, of one core",
    "evaluate": "kit / HFLM, SmolLM2-135M, all",
}
"""Results by name, and the row of each."""


def write_headlines(directory: Path = RESULTS) -> bool:
    """Writes `directory`/headlines.json and returns True; False where one of the five was not measured here.

    Raises:
        KeyError: results have no such row.
    """
    if not all((directory / f"{name}.json").exists() for name in HEADLINES):
        return False
    found: list[Results] = [Results.read(directory / f"{name}.json") for name in HEADLINES]
    rows: list[Row] = []
    for results in found:
        by_name = {row.name: row for row in results.rows}
        rows.append(by_name[HEADLINES[results.name]])
    load = max(results.load_before for results in found)
    write_results("headlines", rows, command="make bench faults", load_before=load, directory=directory)
    return True
