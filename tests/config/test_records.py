"""Field documentation of records, in `help` and in notebooks, and error messages that name
a field.
"""

import copy
import dataclasses
import inspect
import pickle
import subprocess
import sys

import pytest

import kit
from cluster.record import ConfigError, MissingError, Record, field_doc, suggestion

PUBLIC = [kit.Plan, kit.Recipe, kit.Site, kit.ModelSpec]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Small(Record):
    """Two numbers."""

    first: int = field_doc("where it <begins>")
    second: float | None = field_doc("where it ends", default=None)


def test_record_docstring_lists_the_fields():
    assert Small.__doc__ == (
        "Two numbers.\n\nFields:\n    first (int, required): where it <begins>\n"
        "    second (float | None, default None): where it ends"
    )
    assert "micro_batch_size" in str(kit.Plan.__doc__)


@pytest.mark.parametrize("record", PUBLIC)
def test_help_describes_every_field(record: type[Record]):
    text = " ".join(str(inspect.getdoc(record)).split())
    for field in dataclasses.fields(record):
        meaning = " ".join(field.metadata["doc"].split())
        assert f" {field.name} (" in text and f"): {meaning}" in text
    assert "cluster." not in text.split("Fields:")[1].split("site.slurm")[0]
    assert max(map(len, str(record.__doc__).splitlines())) <= 100


def test_import_builds_no_field_docstrings():
    """The test removes the function that builds field docstrings, so an import that called it would
    fail.
    """
    code = "from cluster import field_docs; field_docs._told = None; import kit, kit.cli.app"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_notebook_table_rows_have_field_tooltips():
    cell = "<td style='text-align:left'>"
    shown = Small(first=1)._repr_html_()
    assert f"<tr title='where it &lt;begins&gt;'>{cell}first</td>" in shown
    shown = kit.Plan(pipeline_parallel=2)._repr_html_()
    title = "number of devices over which the transformer blocks are distributed"
    assert f"<tr title='{title}'>{cell}pipeline parallel</td>" in shown


def test_mistyped_field_error_suggests_closest_name():
    for record in PUBLIC:
        name = dataclasses.fields(record)[0].name
        with pytest.raises(ConfigError, match=rf"\.{name}x: unknown key. Did you mean '{name}'\?"):
            record(**{f"{name}x": 1})
    with pytest.raises(ConfigError, match=r"plan.tensor_paralel: .* Did you mean 'tensor_para"):
        kit.Plan(tensor_paralel=2)  # pyright: ignore[reportCallIssue]


def test_suggestion_keeps_the_numbers_of_a_name():
    """A name with another number is the name of another size or machine, not a misspelling. Such a
    name is not suggested.
    """
    for name, known in (("llama4", "llama"), ("dgx-a100", "dgx-h100"), ("llama3-70b", "llama3-8b")):
        assert suggestion(name, [known]) == f"Allowed: {known}."
    for name, known in (("bf61", "bf16"), ("gpt22b", "gpt-22b"), ("frontir", "frontier")):
        assert suggestion(name, [known]).startswith(f"Did you mean {known!r}? ")


@pytest.mark.parametrize("family", [kit.ModelSpec.llama, kit.ModelSpec.gpt])
def test_missing_shapes_are_reported_together(family):
    with pytest.raises(MissingError) as raised:
        family(name="x", num_layers=2)
    shapes = {"hidden_size", "num_heads", "vocab_size", "sequence_length"}
    shapes |= {"ffn_hidden_size"} if family == kit.ModelSpec.llama else set()
    assert set(raised.value.names) == {f"spec.{name}" for name in shapes}
    assert "Write hidden_size=...; help(ModelSpec) says" in str(raised.value)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_record_survives_pickle_and_copy(protocol: int):
    site = kit.Site.load("frontier")
    assert pickle.loads(pickle.dumps(site, protocol)) == site
    assert copy.copy(site) == site == copy.deepcopy(site)
