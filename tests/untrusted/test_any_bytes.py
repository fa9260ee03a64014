"""Files with arbitrary bytes. Every reader returns a value or raises one of the kit's own errors,
within a time limit.
"""

import contextlib
import dataclasses
import json
import re
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cluster.heartbeats import read_rank_heartbeats
from cluster.record import ConfigError
from cluster.site import Site
from cluster.state import read_exit, read_history, read_state
from kit.config.plan import Plan
from kit.config.recipe import Recipe
from kit.config.spec import ModelSpec
from kit.data import Corpus, TokenFile, load_tokenizer
from kit.data.dataset import DatasetInfo
from kit.data.token_file import HEADER, MAGIC
from kit.errors import DataError, RunError
from kit.evaluate.report import EvalReport
from kit.interop.logs.formats import FORMATS, Format
from kit.interop.logs.formats import NAMES as FORMAT_NAMES
from kit.interop.logs.importers import ImportReport, import_log
from kit.interop.logs.logs import LONGEST_LINE, Parser
from kit.interop.weights.hugging_face import import_hugging_face
from kit.interop.weights.weights import SafetensorsFolder
from kit.run.alerts import AlertLog
from kit.run.checkpoint import Manifest
from kit.run.columns import NAMES, parse_rows
from kit.run.metrics import Metrics, rows_to_metrics
from kit.run.tail import Tail

OURS = (ConfigError, DataError, RunError)
SPEC, SITE = ModelSpec.preset("demo"), Site.load("laptop")
LIMIT_S = 2.0
"""Limit of CPU seconds for reading one file. CPU time is used, because wall time depends on the
machine's load.
"""

numbers = st.integers() | st.sampled_from([10**400, 2**63, -1, 0]) | st.floats()
json_values = st.recursive(
    st.none() | st.booleans() | numbers | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=5,
)
deep = st.sampled_from([b"[" * 100_000, b'{"a":' * 50_000, b"\xff\xfe", b"", b"9" * 5000])


def fuzzed(examples: int = 80, **strategies: st.SearchStrategy) -> Callable[[Callable], Callable]:
    """Returns a decorator that calls a test with `examples` random values of the hypothesis
    strategies in `strategies`.
    """
    limits = settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))
    return lambda test: limits(given(**strategies)(test))


def tables(*keys: str) -> st.SearchStrategy[bytes]:
    """Returns a hypothesis strategy for JSON objects with some of the given keys. Such objects
    resemble real files more than random bytes do.
    """
    values = json_values | st.sampled_from(["running", "demo", 1, 5, 0.5, "../x"])
    drawn = st.dictionaries(st.sampled_from(keys), values, max_size=len(keys))
    return drawn.map(lambda table: json.dumps(table).encode())


def fields(record: type) -> list[str]:
    return [field.name for field in dataclasses.fields(record)]


def ended(data: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    return data.map(lambda data: data + b"\n")


@contextlib.contextmanager
def in_time(*allowed: type[Exception]) -> Iterator[None]:
    """Asserts that the with-block ends within LIMIT_S. Errors of the `allowed` types are
    suppressed.
    """
    start = time.process_time()
    with contextlib.suppress(*allowed):
        yield
    assert time.process_time() - start < LIMIT_S


# One file, or several files with the same random bytes --------------------------------------------


def read_metrics(folder: Path) -> None:
    file, plans = folder / "metrics.jsonl", {1: Plan(global_batch_size=8)}
    site = SITE.with_measured_peak("fp32", 1e11, "test")
    metrics = Metrics.read(file, spec=SPEC, plans=plans, site=site)
    assert metrics["step"].tolist() == sorted(set(metrics["step"].tolist()))
    with in_time(*OURS):
        metrics.summary()
    rows = [row for text in iter(Tail(file).new_lines, b"") for row in parse_rows(text)[0]]
    with in_time(*OURS):
        rows_to_metrics(rows, spec=SPEC, plans=plans, site=SITE).mfu()


def read_what_a_job_says(folder: Path) -> None:
    for read in (read_state, read_exit, read_history):
        read(folder)
    read_rank_heartbeats(folder, 1)
    AlertLog(folder / "alerts.jsonl")


def read_text(folder: Path) -> None:
    for name in TEXTS:
        with in_time(*OURS):
            list(Corpus([folder / name]))
    for name in TOKENIZERS:
        with in_time(*OURS):
            load_tokenizer(folder / name)


def read_one(read: Callable[[Path], object], name: str) -> Callable[[Path], None]:
    def of_folder(folder: Path) -> None:
        with in_time(*OURS):
            read(folder / name)

    return of_folder


anything = st.binary(max_size=200) | deep
metric_lines = st.lists(tables(*NAMES, "extra") | deep, max_size=8).map(b"\n".join)
SAID = """
state.json exit.json history.jsonl ranks/rank_00000.json ranks/all.jsonl alerts.jsonl
""".split()
STATE = """
state attempt step heartbeat step_time_s process scheduler_job reason rank time rc host pid
""".split()
TEXTS, TOKENIZERS = ("a.jsonl", "a.txt", "a.parquet"), ("tokenizer.json", "tokenizer.model")
SITE_LINES = """
[slurm];[device];[kubernetes];[device.peak_flops_per_s];base = 'frontier';base = [];name = 'x'
scheduler = 'slurm';scheduler = 'local';modules = ['&'];setup = 1;when = 1979-05-27
devices_per_node = 1e400;devices_per_node = 99999999999999999999
walltime = [{max_hours = inf}];walltime = [{max_hours = nan}]
fp32 = {value = inf, source = 'x'};fp32 = {value = -1, source = ''}
"""
sites = st.lists(
    st.sampled_from(re.split("[;\n]", SITE_LINES)) | st.text(max_size=20), max_size=8
).map(lambda lines: "\n".join(lines).encode(errors="surrogatepass"))
FILES = {
    "metrics": (["metrics.jsonl"], ended(anything | metric_lines), read_metrics),
    "what a job says": (SAID, ended(anything | tables(*STATE)), read_what_a_job_says),
    "a site": (["site.toml"], anything | sites, read_one(Site.load, "site.toml")),
    "text and tokenizers": (
        [*TEXTS, *TOKENIZERS],
        anything | tables("text", "model", "version", "added_tokens"),
        read_text,
    ),
    **{
        record.__name__: (
            ["r.json"],
            anything | tables(*fields(record)),
            read_one(record.read, "r.json"),
        )
        for record in (Manifest, ModelSpec, Plan, Recipe, DatasetInfo, EvalReport)
    },
}
"""Readers by kind of file. Value: (names of the files, strategy for their contents, function that
reads the files in a folder).
"""


@pytest.mark.parametrize("kind", FILES)
def test_readers_survive_any_bytes(tmp_path: Path, kind: str) -> None:
    names, contents, read = FILES[kind]
    (tmp_path / "ranks").mkdir()

    @fuzzed(data=contents)
    def check(data: bytes) -> None:
        for name in names:
            (tmp_path / name).write_bytes(data)
        with in_time():
            read(tmp_path)

    check()


# Several files whose contents refer to each other -------------------------------------------------


places = st.integers(-(2**63), 2**63 - 1) | st.integers(-2, 4)


@fuzzed(
    code=st.integers(0, 255),
    lengths=st.lists(st.integers(-3, 5), max_size=4),
    offsets=st.lists(places, max_size=4),
    index=st.lists(places, max_size=7),
    tokens=st.binary(max_size=24),
    noise=st.binary(max_size=60),
    cut=st.booleans(),
)
def test_token_file_survives_any_index(
    tmp_path, code, lengths, offsets, index, tokens, noise, cut
) -> None:
    offsets = [*offsets, *[0] * len(lengths)][: len(lengths)]
    head = HEADER.pack(MAGIC, 1, code % 9, len(lengths), len(index))
    body = struct.pack(f"<{len(lengths)}i{len(lengths)}q{len(index)}q", *lengths, *offsets, *index)
    (tmp_path / "t.idx").write_bytes(head + noise if cut else head + body)
    (tmp_path / "t.bin").write_bytes(tokens)

    with in_time(*OURS):
        TokenFile(tmp_path / "t").counts(100)


PIECES = """
iteration 1/ 10 |;iteration 2/ 10 |; elapsed time per iteration (ms): 1e3 |; lm loss: nan |; global batch size: 8 |
; consumed samples: inf |; validation loss at iteration 3 | lm loss value: x |;Epoch 0: ; 1/2 [;00:01<00:02,;nan;1e400
; reduced_train_loss=2, global_step=;-1;];LOG Mon Jan  1 00:00:00 2024 - (0, ;1) step_loss : 2 throughput : 3
; memory (MB) | max allocated: 9e999;[2024-01-01 00:00:00];  seq_length ..... 16;  num_layers ..... 0
;  world_size .... 0;  log_interval .... 5;  hidden_size .... 16;  num_attention_heads .... 0;  padded_vocab_size .... 9
;  lr .... nan;  clip_grad .... inf;  global_batch_size .... 8;  log_interval .... 999999999999;  seed .... 999999999999
;  tensor_model_parallel_size .... nan;  zero_stage .... 1e400;  ffn_hidden_size .... inf;iteration 9999999999/ 10 |
;2025-01-01 00:00:00,5 ; step:  1  loss:  2  memory:  1GiB(1%)  tps: 9  tflops: 9
; step:  9  loss:  nan  grad_norm: 1e400  memory:  9GiB(1%)  tps: 9
;validate step:  9  loss:  3 ;iter 7: loss 3, time 9ms;iter 8: loss inf, time .ms;step 8: train loss 1, val loss x
;completed step: 5, seconds: 9, TFLOP/s: 1, loss: 2
;completed step: 99999999999999999999, seconds: .., TFLOP/s: 1, loss: 1
;eval metrics after step: 5, loss=1;"log_history": [;"step": 7,;"loss": 2;"eval_loss": NaN;}
;"step": 1e400,;"max_steps": -1
"""  # noqa: E501
words = PIECES.replace("\n;", ";").strip("\n").split(";")
pieces = st.sampled_from([*words, "\n", "\r", "9" * 5000, "9:" * 300])


@fuzzed(
    120,
    text=st.lists(pieces | st.text(max_size=8), max_size=24).map("".join),
    format=st.sampled_from([None, *FORMAT_NAMES]),
)
def test_log_import_survives_any_text(tmp_path_factory, text: str, format: str | None) -> None:
    folder = tmp_path_factory.mktemp("log")
    for changes in (None, CHANGES):
        with in_time(*OURS):
            imported(folder, text, format=format, changes=changes)


def imported(folder: Path, text: str, **given: Any) -> ImportReport:
    """Writes `text` as a log file, imports the log, and returns the import report."""
    (folder / "log").write_bytes(text.encode(errors="surrogatepass"))
    out = folder / f"run of {len(list(folder.iterdir()))}"
    return import_log(folder / "log", out, site=SITE, spec=SPEC, **given)


LAYOUT = {"tensor_parallel": 1, "pipeline_parallel": 1, "data_parallel": 8, "global_batch_size": 8}
CHANGES = {"plan": LAYOUT}


def test_log_line_for_billions_of_steps_is_refused(tmp_path: Path) -> None:
    line = " iteration {}/ 9999999999 | elapsed time per iteration (ms): 9.0 | lm loss: 2.0 |\n"
    text = "  log_interval ..... 9999999999\n" + line.format(1) + line.format(9999999998)
    with pytest.raises(ConfigError, match="one line for 9,999,999,999 steps"):
        imported(tmp_path, text, changes=CHANGES)


@pytest.mark.parametrize(
    "setting",
    ["global_batch_size 0", "world_size nan", "tensor_model_parallel_size 1e999", "seed \u00b2"]
    + ["tensor_model_parallel_size 0", "log_interval \u00b2", "micro_batch_size inf"],
)
def test_log_with_impossible_setting_is_imported(tmp_path: Path, setting: str) -> None:
    line = " iteration {0}/ 10 | elapsed time per iteration (ms): 9000.0 | lm loss: 2.{0} |\n"
    name, value = setting.split()
    text = f"  world_size .... 8\n  {name} .... {value}\n{line.format(1)}{line.format(2)}"
    report = imported(tmp_path, text, changes=CHANGES)
    assert (report.format, report.steps) == ("megatron", 2)


BEGINNINGS = (
    "Epoch 1: reduced_train_loss=;[config.py:1:print] a ... ;iteration 1/ 1 |;- ;. ;"
    "validation loss ;step: 1  loss: 2  memory: ;2025-01-01 00:00:00,1;iter 1: loss 2, "
    ';completed step: 1, seconds: 1, TFLOP/s: 1, ;"a": 1,'
    ';[step=1/1,epoch=;{"current_steps": 1, "loss": ;iter 1 step 1: loss 1, '
)


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
@pytest.mark.parametrize("line", BEGINNINGS.split(";"))
def test_log_parsing_time_is_bounded(tmp_path: Path, form: Format, line: str) -> None:
    """A regular expression that starts a search at every character would take hours for a line of
    megabytes.
    """
    file = tmp_path / "log"
    with file.open("w") as stream:
        for _ in range(30):
            stream.write((line * LONGEST_LINE)[: LONGEST_LINE - 1] + "\n")
        stream.write(line * 200_000 + "\n")
    start = time.process_time()
    list(Parser(file, form).steps())
    assert time.process_time() - start < 5


CONFIG = """
model_type num_hidden_layers hidden_size num_attention_heads vocab_size intermediate_size
max_position_embeddings n_layer n_embd rope_parameters head_dim
""".split()


@fuzzed(
    config=tables(*CONFIG) | deep,
    index=tables("weight_map", "metadata") | deep,
    weights=st.binary(max_size=80),
)
def test_hugging_face_import_survives_any_bytes(tmp_path_factory, config, index, weights) -> None:
    folder = tmp_path_factory.mktemp("hf")
    sizes = {"num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 9}
    real = {"model_type": "llama", **sizes}
    (folder / "model.safetensors").write_bytes(weights)
    for text in (config, json.dumps(real).encode()):
        (folder / "config.json").write_bytes(text)
        with in_time(*OURS):
            import_hugging_face(folder).decoder()
    (folder / "model.safetensors.index.json").write_bytes(index)
    with in_time(*OURS):
        SafetensorsFolder(folder).read("model.norm.weight")
