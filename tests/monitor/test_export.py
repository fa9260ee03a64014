"""Export of a run's metrics to CSV and Parquet. The tests read the files with pyarrow."""

import json
import math
import re
from csv import reader

import numpy as np
import pytest
from pyarrow import csv, parquet

from kit.cli.exchange import SINKS, TABLES
from kit.errors import ConfigError, RunError
from kit.monitor.export import TARGETS, export
from tests.support.recorded_runs import write

NUMBER = re.compile(r"-?(\d+(\.\d+)?(e[+-]?\d+)?|inf|nan)")


@pytest.mark.parametrize("format", ["csv", "parquet"])
def test_export_has_each_step_of_newest_attempt_once(run, tmp_path, format):
    file = tmp_path / f"table.{format}"
    assert export(run, file, format=format) == 40
    if format == "csv":  # by default pyarrow reads the text "nan" as null
        table = csv.read_csv(file, convert_options=csv.ConvertOptions(null_values=[""]))
    else:
        table = parquet.read_table(file)
    assert table["step"].to_pylist() == list(range(1, 41))
    assert table["attempt"].to_pylist() == [1] * 20 + [2] * 20
    assert table["total_tokens"].to_pylist()[-1] == 40 * 2048
    assert np.allclose(table["mfu"].to_numpy(), 4096 * run.spec.flops_per_token() / 1e11)
    assert math.isnan(table["loss"][4].as_py()) and table["grad_norm"][5].as_py() == math.inf


def test_export_keeps_unknown_columns_and_run_facts(run, tmp_path):
    write(run, ['{"step": 41, "attempt": 2, "note": "an own column", "tokens": 2048}\n'])
    file = tmp_path / "table.parquet"
    assert export(run, file, format="parquet") == 41
    table = parquet.read_table(file)
    assert table["note"].to_pylist()[-1] == json.dumps("an own column")
    assert table["loss"].to_pylist()[-1] is None
    facts = json.loads(table.schema.metadata[b"kit"])
    assert facts["model_flops_per_token"] == run.spec.flops_per_token()
    assert facts["devices_by_attempt"] == {"1": 1, "2": 1}


def test_no_cell_of_a_csv_is_a_formula(run, tmp_path):
    """A spreadsheet program evaluates cells that start with = + - or @. The functions HYPERLINK and
    DDE can reach other programs and the network.
    """
    names = ["=HYPERLINK(1)", "+1+1", "-1-1", "@SUM(1)", "\t=1", "plain"]
    row = {"step": 41, "attempt": 2, "tokens": 1, "loss": -2.5, "big": -(2**70)}
    row |= {name: name for name in names}
    write(run, [json.dumps(row) + "\n"])
    export(run, tmp_path / "table.csv", format="csv")
    with (tmp_path / "table.csv").open(newline="") as stream:
        cells = [cell for line in reader(stream) for cell in line]
    assert "'=HYPERLINK(1)" in cells and "plain" in cells and "-2.5" in cells
    formulas = [cell for cell in cells if cell and cell[0] in "=+-@\t\r"]
    assert all(NUMBER.fullmatch(cell) for cell in formulas)


def test_export_overwrites_only_with_its_option(run, tmp_path):
    file = tmp_path / "precious.csv"
    file.write_text("precious")
    with pytest.raises(RunError, match="exists"):
        export(run, file, format="csv")
    with pytest.raises(ConfigError, match="Did you mean 'csv'"):
        export(run, file, format="cvs", overwrite=True)
    with pytest.raises(RunError, match="folder that exists"):
        export(run, tmp_path / "no" / "table.csv", format="csv")
    assert file.read_text() == "precious" and export(run, file, format="csv", overwrite=True) == 40
    assert list(tmp_path.glob("*precious*")) == [file]
    (run.directory / "metrics.jsonl").unlink()
    assert export(run, tmp_path / "empty.parquet", format="parquet") == 0


def test_export_command_lists_every_target():
    assert {*TABLES, *SINKS} == {*TARGETS}
