"""Any bytes in any file of a run, a data set or a site give a value or the kit's own error: no
other, and no hang.
"""

import contextlib
import dataclasses
import functools
import json
import struct
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cluster.heartbeats import read_rank_heartbeats
from cluster.record import ConfigError
from cluster.site import Site
from cluster.state import read_exit, read_history, read_state
from kit.convert.hugging_face import SafetensorsFolder, import_hugging_face
from kit.data import Corpus, TokenFile, load_tokenizer
from kit.data.dataset import DatasetInfo
from kit.data.token_file import HEADER, MAGIC
from kit.errors import DataError, RunError
from kit.evaluate.report import EvalReport
from kit.foreign.formats import FORMATS, Format
from kit.foreign.formats import NAMES as FORMAT_NAMES
from kit.foreign.importers import import_log
from kit.foreign.logs import LONGEST_LINE, Parser
from kit.plan import Plan
from kit.recipe import Recipe
from kit.run.alerts import AlertLog
from kit.run.checkpoint import Manifest
from kit.run.columns import NAMES
from kit.run.metrics import Metrics, MetricsFollower, rows_to_metrics
from kit.spec import ModelSpec

OURS = (ConfigError, DataError, RunError)
SPEC, SITE = ModelSpec.preset("demo"), Site.load("laptop")
LIMIT_S = 2.0
"""CPU time of one reading; wall time is the machine's affair."""

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([10**400, 2**63, -1, 0])
    | st.floats()
    | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=5,
)
deep = st.sampled_from([b"[" * 100_000, b'{"a":' * 50_000, b"\xff\xfe", b"", b"9" * 5000])


def fuzzed(examples: int = 80, **strategies: st.SearchStrategy) -> Callable[[Callable], Callable]:
    """Returns a decorator: the test is given so many examples, and none may take long."""

    def decorate(test: Callable) -> Callable:
        @functools.wraps(test)
        def timed(*arguments: object, **example: object) -> None:
            start = time.process_time()
            test(*arguments, **example)
            assert time.process_time() - start < LIMIT_S

        limits = settings(
            max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck)
        )
        return limits(given(**strategies)(timed))

    return decorate


def tables(*keys: str) -> st.SearchStrategy[bytes]:
    """JSON tables with some of these keys and any values: nearer to the real thing than random
    bytes.
    """
    values = json_values | st.sampled_from(["running", "demo", 1, 5, 0.5, "../x"])
    return st.dictionaries(st.sampled_from(keys), values, max_size=len(keys)).map(
        lambda t: json.dumps(t).encode()
    )


def fields(record: type) -> list[str]:
    return [field.name for field in dataclasses.fields(record)]


def ours_or_value(read: Callable[[], object]) -> None:
    """Calls a reader; any exception that is not the kit's own fails the test."""
    with contextlib.suppress(*OURS):
        read()


@fuzzed(
    data=st.binary(max_size=200)
    | deep
    | st.lists(tables(*NAMES, "extra") | deep, max_size=8).map(b"\n".join)
)
def test_metrics(tmp_path: Path, data: bytes) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(data + b"\n")
    plan = Plan(global_batch_size=8)
    metrics = Metrics.read(
        file, spec=SPEC, plans={1: plan}, site=SITE.with_measured_peak("fp32", 1e11, "test")
    )
    assert metrics["step"].tolist() == sorted(set(metrics["step"].tolist()))
    ours_or_value(metrics.summary)
    rows = [row for rows in MetricsFollower(file).parts() for row in rows]
    ours_or_value(rows_to_metrics(rows, spec=SPEC, plans={1: plan}, site=SITE).mfu)


STATE = (
    "state",
    "attempt",
    "step",
    "heartbeat",
    "step_time_s",
    "process",
    "scheduler_job",
    "reason",
    "rank",
    "time",
)


@fuzzed(data=st.binary(max_size=200) | deep | tables(*STATE, "rc", "host", "pid"))
def test_what_a_job_says(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "ranks").mkdir(exist_ok=True)
    for name in (
        "state.json",
        "exit.json",
        "history.jsonl",
        "ranks/rank_00000.json",
        "ranks/all.jsonl",
        "alerts.jsonl",
    ):
        (tmp_path / name).write_bytes(data + b"\n")
    (
        read_state(tmp_path),
        read_exit(tmp_path),
        read_history(tmp_path),
        read_rank_heartbeats(tmp_path, 1),
    )
    AlertLog(tmp_path / "alerts.jsonl")


RECORDS = (Manifest, ModelSpec, Plan, Recipe, DatasetInfo, EvalReport)


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.__name__)
def test_records(tmp_path: Path, record: type) -> None:
    @fuzzed(40, data=st.binary(max_size=200) | deep | tables(*fields(record)))
    def check(data: bytes) -> None:
        (tmp_path / "r.json").write_bytes(data)
        ours_or_value(lambda: record.read(tmp_path / "r.json"))  # type: ignore[attr-defined]

    check()


words = st.sampled_from(
    [
        "[slurm]",
        "[device]",
        "[kubernetes]",
        "base = 'frontier'",
        "base = []",
        "name = 'x'",
        "scheduler = 'slurm'",
        "scheduler = 'local'",
        "devices_per_node = 1e400",
        "devices_per_node = 99999999999999999999",
        "modules = ['&']",
        "setup = 1",
        "walltime = [{max_hours = inf}]",
        "walltime = [{max_hours = nan}]",
        "when = 1979-05-27",
        "[device.peak_flops_per_s]",
        "fp32 = {value = inf, source = 'x'}",
        "fp32 = {value = -1, source = ''}",
    ]
)


@fuzzed(
    data=st.binary(max_size=200)
    | deep
    | st.lists(words | st.text(max_size=20), max_size=8).map("\n".join)
)
def test_site_files(tmp_path: Path, data: bytes | str) -> None:
    file = tmp_path / "site.toml"
    file.write_bytes(data if isinstance(data, bytes) else data.encode(errors="surrogatepass"))
    ours_or_value(lambda: Site.load(file))


numbers = st.integers(-(2**63), 2**63 - 1) | st.integers(-2, 4)


@fuzzed(
    code=st.integers(0, 255),
    lengths=st.lists(st.integers(-3, 5), max_size=4),
    offsets=st.lists(numbers, max_size=4),
    index=st.lists(numbers, max_size=7),
    tokens=st.binary(max_size=24),
    noise=st.binary(max_size=60),
    cut=st.booleans(),
)
def test_token_files(tmp_path, code, lengths, offsets, index, tokens, noise, cut) -> None:
    offsets = [*offsets, *[0] * len(lengths)][: len(lengths)]
    head = HEADER.pack(MAGIC, 1, code % 9, len(lengths), len(index))
    body = struct.pack(f"<{len(lengths)}i{len(lengths)}q{len(index)}q", *lengths, *offsets, *index)
    (tmp_path / "t.idx").write_bytes(head + noise if cut else head + body)
    (tmp_path / "t.bin").write_bytes(tokens)

    def read() -> None:
        file = TokenFile(tmp_path / "t")
        for document in range(file.num_documents):
            file.document(document)
        file.counts(100)

    ours_or_value(read)


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
pieces = st.sampled_from(
    [*PIECES.replace("\n;", ";").strip("\n").split(";"), "\n", "\r", "9" * 5000, "9:" * 300]
)


@fuzzed(
    120,
    text=st.lists(pieces | st.text(max_size=8), max_size=24).map("".join),
    format=st.sampled_from([None, *FORMAT_NAMES]),
)
def test_logs_of_other_trainers(tmp_path_factory, text: str, format: str | None) -> None:
    folder = tmp_path_factory.mktemp("log")
    (folder / "log").write_bytes(text.encode(errors="surrogatepass"))
    ours_or_value(
        lambda: import_log(folder / "log", folder / "run", format=format, site=SITE, spec=SPEC)
    )
    changes = {
        "plan": {
            "tensor_parallel": 1,
            "pipeline_parallel": 1,
            "data_parallel": 1,
            "global_batch_size": 8,
        }
    }
    ours_or_value(
        lambda: import_log(
            folder / "log", folder / "two", format=format, site=SITE, spec=SPEC, changes=changes
        )
    )


def test_a_line_cannot_stand_for_millions_of_steps(tmp_path: Path) -> None:
    line = " iteration {}/ 9999999999 | elapsed time per iteration (ms): 9.0 | lm loss: 2.0 |\n"
    (tmp_path / "log").write_text(
        "  log_interval ..... 9999999999\n" + line.format(1) + line.format(9999999998)
    )
    changes = {
        "plan": {
            "tensor_parallel": 1,
            "pipeline_parallel": 1,
            "data_parallel": 1,
            "global_batch_size": 8,
        }
    }
    with pytest.raises(ConfigError, match="one line for 9,999,999,999 steps"):
        import_log(
            tmp_path / "log",
            tmp_path / "run",
            format="megatron",
            site=SITE,
            spec=SPEC,
            changes=changes,
        )


@pytest.mark.parametrize(
    "setting",
    ["global_batch_size 0", "world_size nan", "tensor_model_parallel_size 1e999", "seed \u00b2"]
    + ["tensor_model_parallel_size 0", "log_interval \u00b2", "micro_batch_size inf"],
)
def test_settings_that_no_trainer_prints(tmp_path: Path, setting: str) -> None:
    line = " iteration {0}/ 10 | elapsed time per iteration (ms): 9000.0 | lm loss: 2.{0} |\n"
    name, value = setting.split()
    text = f"  world_size .... 8\n  {name} .... {value}\n{line.format(1)}{line.format(2)}"
    (tmp_path / "log").write_text(text)
    plan = {"tensor_parallel": 1, "pipeline_parallel": 1, "data_parallel": 8}
    changes = {"plan": {**plan, "global_batch_size": 8}}
    report = import_log(tmp_path / "log", tmp_path / "run", site=SITE, spec=SPEC, changes=changes)
    assert (report.format, report.steps) == ("megatron", 2)


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
@pytest.mark.parametrize(
    "line",
    [
        "Epoch 1: reduced_train_loss=",
        "[config.py:1:print] a ... ",
        "iteration 1/ 1 |",
        "- ",
        ". ",
        "validation loss ",
        "step: 1  loss: 2  memory: ",
        "2025-01-01 00:00:00,1",
        "iter 1: loss 2, ",
        "completed step: 1, seconds: 1, TFLOP/s: 1, ",
        '"a": 1,',
    ],
)
def test_no_line_of_a_log_takes_long(tmp_path: Path, form: Format, line: str) -> None:
    """Patterns that search a long line from each of its places would take hours on a few
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


CONFIG = (
    "model_type",
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "vocab_size",
    "intermediate_size",
    "max_position_embeddings",
    "n_layer",
    "n_embd",
    "rope_parameters",
    "head_dim",
)


@fuzzed(
    config=tables(*CONFIG) | deep,
    index=tables("weight_map", "metadata") | deep,
    weights=st.binary(max_size=80),
)
def test_hugging_face_folders(
    tmp_path_factory, config: bytes, index: bytes, weights: bytes
) -> None:
    folder = tmp_path_factory.mktemp("hf")
    real = {
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": 8,
        "num_attention_heads": 2,
        "vocab_size": 9,
    }
    (folder / "model.safetensors").write_bytes(weights)
    for text in (config, json.dumps(real).encode()):
        (folder / "config.json").write_bytes(text)
        ours_or_value(lambda: import_hugging_face(folder).decoder())
    (folder / "model.safetensors.index.json").write_bytes(index)
    ours_or_value(lambda: SafetensorsFolder(folder).read("model.norm.weight"))


@fuzzed(data=st.binary(max_size=120) | deep | tables("text", "model", "version", "added_tokens"))
def test_text_and_tokenizers(tmp_path: Path, data: bytes) -> None:
    for name in ("a.jsonl", "a.txt", "a.parquet", "tokenizer.json", "tokenizer.model"):
        (tmp_path / name).write_bytes(data)
    for name in ("a.jsonl", "a.txt", "a.parquet"):
        ours_or_value(lambda name=name: list(Corpus([tmp_path / name])))
    for name in ("tokenizer.json", "tokenizer.model"):
        ours_or_value(lambda name=name: load_tokenizer(tmp_path / name))
