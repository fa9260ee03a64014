"""Small files that would take much time or memory. Each reader reads crafted files in a child
process with limits of CPU time and memory.
"""

import gzip
import json
import pickle
import re
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from cluster.job import LOG_BYTES, Job
from cluster.logs import end_reason, keep_last_lines, log_tail
from cluster.state import log_path, read_history
from kit.data import Corpus, load_tokenizer
from kit.data.tokenizer import BytePairTokenizer, train_tokenizer
from kit.errors import ConfigError, DataError, RunError
from kit.evaluate.task_data import read_folder
from kit.interop.logs import patterns
from kit.interop.logs.formats import FORMATS, Format
from kit.interop.logs.logs import LONGEST_LINE, Parser
from kit.interop.logs.patterns import pattern_format
from kit.interop.logs.suggest import suggested_pattern
from kit.interop.weights.hugging_face import import_hugging_face
from kit.interop.weights.other_trainers import missing_weight_advice
from kit.run.checkpoint_reader import PlainUnpickler, _MetadataUnpickler
from tests.support.hostile import finished_run, in_a_child

OURS = (ConfigError, DataError, RunError, pickle.UnpicklingError)
CPU_S, MEMORY_BYTES = 3.0, 512 << 20
"""Limits for reading one file of at most 200 KB: CPU seconds, and bytes of memory."""

LINE_S = 0.3
"""Limit of CPU seconds for parsing one log line of 8 KiB. Parsing normally takes 0.03 s."""


def bounded(read: Callable[[], Any], cpu_s: float = CPU_S) -> Any:
    """Calls a reader in a child process. Returns the reader's result, or the kit's own error as
    (type, text). The child process is killed at the limit of CPU time, and cannot allocate more
    than the limit of memory.
    """

    def work() -> Any:
        now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
        resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY_BYTES, resource.RLIM_INFINITY))
        resource.setrlimit(resource.RLIMIT_CPU, (int(used + cpu_s) + 1, resource.RLIM_INFINITY))
        begin = time.process_time()
        try:
            found = read()
        except OURS as error:
            found = type(error).__name__, str(error)
        took = time.process_time() - begin
        assert took < cpu_s, f"{took:.1f} s"
        return found

    return in_a_child(work)


# Pickles ------------------------------------------------------------------------------------------


def nested_tuples(depth: int) -> bytes:
    """Returns a pickle of a dict whose key is a tuple of two equal tuples, nested `depth` times.
    Hashing the key visits 2^depth tuples.
    """
    code = b"\x80\x04}N\x85\x94"
    for level in range(depth):
        code += b"h" + bytes([level]) + b"\x86\x94"
    return code + b"K\x01s."


def doubled_by_dup(depth: int) -> bytes:
    return b"\x80\x04}N\x85" + b"2\x86" * depth + b"K\x01s."


def colliding_numbers(count: int) -> bytes:
    """Returns a pickle of a dict whose keys are integers with equal hashes, so that each insertion
    is slow.
    """
    keys = b""
    for number in range(count):
        value = (number * (2**61 - 1)).to_bytes(12, "little")
        keys += b"\x8a\x0c" + value + b"N"
    return b"\x80\x04}(" + keys + b"u."


def nested_indexes(depth: int) -> bytes:
    """Returns a pickle of a dict whose key is a `MetadataIndex` that contains another one twice,
    nested `depth` times.
    """
    name = b"torch.distributed.checkpoint.metadata"
    code = b"\x80\x04}c" + name + b"\nMetadataIndex\n\x94K\x01\x94"
    for _ in range(depth):
        code += b"h\x00)\x81\x94}(\x8c\x03fqnh\x01\x8c\x06offsetNub"
    return code + b"K\x01s."


PICKLES = {
    "memo index": b"\x80\x02Nr\xff\xff\xff\x7f.",
    "memo index in a text": b"\x80\x02X\x01\x00\x00\x00ar\xff\xff\xff\x7f.",
    "frame": b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7fN.",
    "length of bytes": b"\x80\x04\x8e\xff\xff\xff\xff\xff\x00\x00\x00.",
    "nested tuples": nested_tuples(60),
    "doubled": doubled_by_dup(60),
    "numbers": colliding_numbers(12_000),
    "indexes": nested_indexes(3),
    "lists": b"\x80\x04" + b"]" * 100_000 + b".",
}


@pytest.mark.parametrize("name", PICKLES)
def test_pickle_bomb_is_bounded(name: str) -> None:
    for reader in (PlainUnpickler, _MetadataUnpickler):

        def read(reader: type = reader) -> str:
            try:
                reader(PICKLES[name]).load()
            except (ValueError, EOFError, RecursionError, TypeError, OverflowError) as error:
                return type(error).__name__
            return ""

        bounded(read)


# Logs ---------------------------------------------------------------------------------------------


def fragments(pattern: str) -> list[str]:
    """Returns the literal texts that occur in a regular expression."""
    words = re.findall(
        r"(?:\\[\[\](){}|.]|[A-Za-z_ :=/,<\"'-])+", re.sub(r"\(\?P<\w+>", "(", pattern)
    )
    plain = [re.sub(r"\\(.)", r"\1", word) for word in words]
    return [word for word in dict.fromkeys(plain) if len(word) > 2][:12]


CRAFTED = (
    "1111-11-11 11:11:11,{1} tps: ",
    "1111-11-11 11:11:11.{1} [step=1/1,epoch=",
    "Epoch 1:{1} reduced_train_loss=",
    "iteration 1/ 1 | elapsed time per iteration (ms): 1 |{ }|",
)
"""Log lines that took a second each to parse. Each has a beginning, a character in braces that is
repeated, and an end.
"""


def hostile_lines(form: Format) -> Iterator[str]:
    """Yields log lines of the largest length. Each line repeats one text fragment of a log format,
    or begins with several of them.
    """
    found = [*fragments(form.line), *fragments(form.validation)]
    for setting in form.settings:
        found += fragments(setting)
    for line in CRAFTED:
        begin, _, rest = line.partition("{")
        filler, _, end = rest.partition("}")
        yield begin + filler * (LONGEST_LINE - len(line)) + end
    beginnings = ["", "".join(f"{word} 1 " for word in found[:6])]
    for beginning in beginnings:
        for unit in ("1", " ", '"', "|", *(f"{word}1 " for word in found)):
            yield (beginning + unit * LONGEST_LINE)[: LONGEST_LINE - 1]


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_log_parsing_time_is_linear_in_line_length(tmp_path: Path, form: Format) -> None:
    """If the parsing time grew with the square of the line length, a line of 8 KiB would take a
    second.
    """

    def slowest() -> tuple[float, str]:
        found = []
        for line in hostile_lines(form):
            (tmp_path / "log").write_text(f"{line}\n}}\n")
            begin = time.process_time()
            list(Parser(tmp_path / "log", form).steps())
            found.append((time.process_time() - begin, line[:100]))
        return max(found)

    seconds, line = bounded(slowest, 60.0)
    assert seconds < LINE_S, line


def test_blank_json_lines_are_parsed_in_linear_time(tmp_path: Path) -> None:
    form = next(form for form in FORMATS if form.closes)
    (tmp_path / "log").write_text(("\n" * LONGEST_LINE + "}\n") * 4)
    bounded(lambda: list(Parser(tmp_path / "log", form).steps()))


def test_slow_pattern_of_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "PATTERN_S", 0.2)
    (tmp_path / "log").write_text("step 1 loss 1 " * 500 + "\n")
    form = pattern_format(r"step (?P<step>\d+).*loss.*loss.*loss.*loss (?P<loss>[a-z])")
    kind, text = bounded(lambda: list(Parser(tmp_path / "log", form).steps()))
    assert kind == "ConfigError" and "takes more than 0.2 s on one line" in text


def test_time_to_suggest_a_pattern_is_bounded(tmp_path: Path) -> None:
    line = "step 1 time 2 ms loss 1 "
    (tmp_path / "log").write_text("step 1 loss 2 time 3 ms\n" + (line * 340 + "\n") * 5)
    bounded(lambda: suggested_pattern(tmp_path / "log"))


def test_only_the_end_of_a_huge_log_is_read(tmp_path: Path) -> None:
    run = finished_run(tmp_path / "run")
    log = log_path(run.directory, 1, 0)
    with log.open("r+b") as stream:
        stream.seek(2**40)
        stream.write(b"the end\n")

    def read() -> tuple[str, int, str]:
        job = Job.attach(run.directory)
        _, pieces = job.read_logs()
        first = next(pieces)
        return log_tail(log)[-7:], len(first), job.logs()[-8:]

    tail, length, text = bounded(read)
    assert tail == "the end" and text == "the end\n"
    assert length <= 2**20 and LOG_BYTES < MEMORY_BYTES


def test_huge_log_line_is_followed_in_parts(tmp_path: Path) -> None:
    run = finished_run(tmp_path / "run")
    log_path(run.directory, 1, 0).write_text("x" * (40 << 20))
    found = bounded(lambda: [len(line) for line in Job.attach(run.directory).follow()])
    assert sum(found) == 40 << 20 and max(found) <= 4 << 20


def test_time_to_find_last_log_lines_is_bounded(tmp_path: Path) -> None:
    node = tmp_path / "logs" / "attempt_01" / "node_00000.log"
    node.parent.mkdir(parents=True)
    for unit in ("attempt 1 of x in job ", "srun: ", "error ", "kit: ", "attempt 1 of "):
        text = unit * (200_000 // len(unit))
        bounded(lambda text=text: end_reason(text))
        node.write_text(f"0: {text}")
        bounded(lambda: keep_last_lines(tmp_path, 1, 0, 0, 1, tmp_path / "none"))


# Records, tokenizers, data ------------------------------------------------------------------------

JSON = {
    "deep list": b"[" * 100_000,
    "deep table": b'{"a":' * 30_000,
    "long number": b"9" * 200_000,
    "many lists": b"[" + b"[]," * 60_000 + b"0]",
}


@pytest.mark.parametrize("name", JSON)
def test_json_bomb_in_a_model_folder_is_bounded(tmp_path: Path, name: str) -> None:
    files = "config.json model.safetensors.index.json tokenizer_config.json tokenizer.json"
    for file in files.split():
        (tmp_path / file).write_bytes(JSON[name])
    (tmp_path / "history.jsonl").write_bytes(JSON[name] + b"\n")
    bounded(lambda: import_hugging_face(tmp_path))
    bounded(lambda: missing_weight_advice(tmp_path))
    bounded(lambda: load_tokenizer(tmp_path))
    assert bounded(lambda: read_history(tmp_path)) == []


def test_terabyte_json_file_is_not_read(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors.index.json", "tokenizer_config.json"):
        with (tmp_path / name).open("wb") as stream:
            stream.truncate(2**40)
    tokenizer = train_tokenizer(["a b c"], 257)
    (tmp_path / "tokenizer.json").write_bytes(tokenizer.data)
    assert "more than" in bounded(lambda: load_tokenizer(tmp_path))[1]
    bounded(lambda: import_hugging_face(tmp_path))
    bounded(lambda: missing_weight_advice(tmp_path))


def test_tokenizer_panic_becomes_a_data_error() -> None:
    table = json.loads(train_tokenizer(["a b c"], 257).data)
    pattern = {"type": "Split", "pattern": {"Regex": "(a|aa)+$"}, "behavior": "Isolated"}
    table["pre_tokenizer"] = {**pattern, "invert": False}
    tokenizer = BytePairTokenizer(json.dumps(table).encode())

    def encode() -> Any:
        return tokenizer.encode("a" * 200 + "b")

    kind, text = bounded(encode, 20.0)
    assert kind == "DataError" and "tokenizers library failed" in text


def card(text: str) -> str:
    return f"---\n{text}\n---\n"


def aliases(levels: int) -> str:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    for level in range(1, levels):
        ten = ", ".join([f"*a{level - 1}"] * 10)
        lines.append(f"a{level}: &a{level} [{ten}]")
    return "\n".join(lines)


def test_yaml_alias_bomb_in_dataset_card_is_refused(tmp_path: Path) -> None:
    import datasets  # noqa: F401 - imported before the children, whose time is limited

    for name in ("README.md", ".huggingface.yaml"):
        folder = tmp_path / name / "owner" / "name"
        folder.mkdir(parents=True)
        (folder / "README.md").write_text("# A data set\n")
        (folder / name).write_text(card(aliases(9)) if name == "README.md" else aliases(9))
        root = tmp_path / name
        kind, text = bounded(lambda root=root: read_folder(root, "owner/name", None, {}))
        assert kind == "DataError" and "alias" in text


def test_compression_bomb_in_corpus_is_refused(tmp_path: Path) -> None:
    line = b'{"text": "' + b"a" * 1000 + b'"}\n'
    with pyarrow.output_stream(str(tmp_path / "a.jsonl.zst"), compression="zstd") as stream:
        for _ in range(100):
            stream.write(line * 1000)
    kind, text = bounded(lambda: list(Corpus([tmp_path / "a.jsonl.zst"])))
    assert kind == "DataError" and "times its size" in text
    (tmp_path / "honest.jsonl.gz").write_bytes(gzip.compress(line * 10))
    assert len(list(Corpus([tmp_path / "honest.jsonl.gz"]))) == 1


def test_parquet_compression_bomb_is_refused(tmp_path: Path) -> None:
    rows = pyarrow.table({"text": [str(number) + "y" * 4_000_000 for number in range(17)]})
    file = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(rows, file, compression="zstd", use_dictionary=False)
    assert file.stat().st_size < 50_000
    kind, text = bounded(lambda: list(Corpus([file])))
    assert kind == "DataError" and "times its size" in text
