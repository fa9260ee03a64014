"""Any decoder that transformers loads gets the scores of lm-eval's own model class. A folder that
cannot be loaded is refused, and the error names its defect.
"""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    PreTrainedTokenizerFast,
)

from kit.errors import ConfigError, DataError, RunError
from kit.evaluate import Options, evaluate_folder, packed
from kit.evaluate.continuation import continue_text
from kit.evaluate.devices import DeviceLayout
from kit.evaluate.loading import load_lm
from kit.evaluate.tasks import quiet_harness
from tests.evaluate.conftest import asked, kit

LENGTH = 128
SHAPE = {
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": LENGTH,
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 0),
}
GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": LENGTH}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
PACKED: dict[str, dict[str, Any]] = {
    **{name: {} for name in packed.PACKED_TYPES},
    "gpt2": GPT,
    "mistral": {"sliding_window": None},
    "mixtral": {"num_local_experts": 4},
    "olmoe": EXPERTS,
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "qwen3": {"head_dim": 16},
    "qwen3_moe": {**EXPERTS, "head_dim": 16, "moe_intermediate_size": 32},
    "starcoder2": {"sliding_window": None},
}
"""Settings that make each model small, by architecture. The kit scores these architectures with
packed requests."""
PLAIN: dict[str, dict[str, Any]] = {
    "bloom": {"n_layer": 2, "n_head": 4},
    "falcon": {"alibi": True},
    "gemma2": {"head_dim": 16, "sliding_window": 16},
    "gemma3_text": {"head_dim": 16, "sliding_window": 16},
    "granite": {"logits_scaling": 4.0, "embedding_multiplier": 3.0},
    "mamba": {"state_size": 8},
    "mistral": {"sliding_window": 16},
    "phi3": {
        "original_max_position_embeddings": 64,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1.0] * 4,
            "long_factor": [2.0] * 4,
            "original_max_position_embeddings": 64,
        },
    },
    "qwen2": {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
}
"""Settings by architecture of models that packing would score wrongly, so the kit scores them
without packing."""
CASES = [(name, extra, True) for name, extra in PACKED.items()] + [
    (name, extra, False) for name, extra in PLAIN.items()
]
ITEMS = [
    {
        "q": f"Question {i}: why is number {i % 7} odd, when the import statement"
        f" defines {'x, y and ' * (2 * i)}z?\nAnswer:",
        "choices": ["it is", "the module does", "seven"][: 2 + i % 2],
        "gold": i % 2,
    }
    for i in range(8)
]
"""Items of growing length. Some are longer than the models' sliding windows, and one is longer than
the models' sequence."""


def write_model(folder: Path, tokenizer: Any, kind: str, **extra: Any) -> Path:
    """Writes a folder with a tokenizer and a random model. Its weights are large enough to give
    different texts different scores.
    """
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**SHAPE, **extra})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2 and 0 < parameter.std() < 0.2:
                parameter.mul_(0.2 / parameter.std())
    model.save_pretrained(folder)
    inner = Tokenizer.from_str(tokenizer.data.decode())
    end = inner.id_to_token(tokenizer.eos_id)
    PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=end).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory, tokenizer) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "qwen", tokenizer, "qwen2")


@pytest.mark.parametrize(("kind", "extra", "packs"), CASES)
def test_family_log_likelihoods_equal_hflm(kind, extra, packs, tokenizer, tmp_path):
    folder = write_model(tmp_path / kind, tokenizer, kind, **extra)
    options = Options(batch_tokens=600)
    lm = load_lm(folder, None, options, DeviceLayout(), torch.device("cpu"))
    with quiet_harness():
        reference = packed.HFLM(str(folder), device="cpu", dtype="float32", batch_size=1)
    assert lm.packs == packs
    if "max_position_embeddings" in json.loads((folder / "config.json").read_text()):
        assert lm.max_length == reference.max_length
    pairs = [(item["q"], f" {choice}") for item in ITEMS for choice in item["choices"]]
    found = lm.loglikelihood(asked("loglikelihood", pairs))
    expected = reference.loglikelihood(asked("loglikelihood", pairs), disable_tqdm=True)
    values = [value for value, _ in expected]
    assert [value for value, _ in found] == pytest.approx(values, abs=2e-4)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    assert torch.tensor(values).std() > 3, "they must differ to mean anything"


def test_sequence_length_defaults_to_the_harness_value(tokenizer, tmp_path):
    """The configuration of a Mamba model has no sequence length."""
    folder = write_model(tmp_path / "mamba", tokenizer, "mamba", state_size=8)
    lm = load_lm(folder, None, Options(), DeviceLayout(), torch.device("cpu"))
    with quiet_harness():
        reference = packed.HFLM(str(folder), device="cpu")
    assert lm.max_length == reference.max_length


# Task definitions of the user ---------------------------------------------------------------------


@pytest.fixture
def own_tasks(tmp_path: Path) -> Path:
    """Returns a folder with definitions of harness tasks: a task, a group that contains it, and a
    task whose documents are made by Python code.
    """
    folder = tmp_path / "tasks"
    folder.mkdir()
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(item) + "\n" for item in ITEMS))
    body = f"""
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: q
doc_to_choice: choices
doc_to_target: gold
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""
    (folder / "mine.yaml").write_text(f"task: mine_odd\ntag: mine_all{body}")
    processed = "process_docs: !function code.first_half\n"
    (folder / "half.yaml").write_text(f"task: mine_half\ntag: mine_all{body}{processed}")
    half = "def first_half(rows):\n    return rows.select(range(len(rows) // 2))\n"
    (folder / "code.py").write_text(half)
    mean = "aggregate_metric_list: [{metric: acc}]\n"
    (folder / "both.yaml").write_text(f"group: mine_both\ntask: [mine_odd, mine_half]\n{mean}")
    return folder


def harness_results(
    folder: Path, tasks: list[str], include: Path, *, samples_too: bool = False, **more: Any
) -> Any:
    """Returns the results of lm-eval's own model class with batch size 1, the default of its
    command: metrics by task. With `samples_too`, returns the samples of the first task instead.
    """
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.tasks import TaskManager

    with quiet_harness():
        found: Any = simple_evaluate(
            model="hf",
            model_args=f"pretrained={folder}",
            tasks=[*tasks],
            device="cpu",
            task_manager=TaskManager(include_path=str(include), include_defaults=False),
            **more,
        )
    if samples_too:
        return found["samples"][tasks[0]]
    return {**found["results"], **found.get("groups", {})}


@pytest.mark.parametrize("kind", ["qwen2", "gemma2"])
def test_own_task_scores_equal_lm_eval(kind, tokenizer, own_tasks, tmp_path, no_network):
    extra = PLAIN[kind] if kind == "gemma2" else {}
    folder = write_model(tmp_path / kind, tokenizer, kind, **extra)
    names = ["mine_odd", "mine_half", "mine_both"]
    expected = {name: harness_results(folder, [name], own_tasks)[name] for name in names}
    given = ("eval", folder, "--tasks", "mine_*", "--include_path", own_tasks, "--json")
    report = json.loads(kit(*given, "--output_path", tmp_path / "out"))
    assert (tmp_path / "out" / f"{kind}.eval.json").is_file()
    scores = {score["task"]: score for score in report["scores"]}
    assert set(scores) == {*names}
    for name in names:
        for metric in scores[name]["metrics"]:
            theirs = expected[name].get(f"{metric['name']},none")
            if theirs is not None:
                assert metric["value"] == pytest.approx(theirs, abs=1e-6)
    assert scores["mine_half"]["num_items"] == len(ITEMS) // 2
    assert ("by lm-eval's own method" in scores["mine_odd"]["note"]) == (kind == "gemma2")
    origins = {source["origin"] for source in scores["mine_odd"]["data"]}
    assert "definition" in origins
    by_file = evaluate_folder(folder, (str(own_tasks / "half.yaml"),), out=tmp_path / "file.json")
    assert by_file["mine_half"].metric("acc").value == expected["mine_half"]["acc,none"]
    given = {"include_path": own_tasks, "out": tmp_path / "limited.json"}
    for limit, counts in ((0.3, (3, 2)), (2, (2, 2)), (7, (7, 4))):
        limited = evaluate_folder(folder, ("mine_all", "mine_both"), limit=limit, **given)
        both = harness_results(folder, ["mine_both"], own_tasks, limit=limit)
        for name, count in zip(("mine_odd", "mine_half"), counts, strict=True):
            assert limited[name].num_items == count
            assert limited[name].metric("acc").value == both[name]["acc,none"]
        assert limited["mine_both"].num_items == sum(counts)
        assert limited["mine_both"].metric("acc").value == both["mine_both"]["acc,none"]


def test_perplexity_interval_equals_bootstrap(qwen, own_tasks, tmp_path):
    """The bootstrap of lm-eval resamples the log-likelihoods of its own model class."""
    (own_tasks / "words.yaml").write_text(
        f"""
task: mine_words
dataset_path: json
dataset_kwargs: {{data_files: {{test: {tmp_path / "words.jsonl"}}}}}
test_split: test
output_type: loglikelihood
doc_to_text: q
doc_to_target: last
metric_list: [{{metric: perplexity}}, {{metric: acc}}]
"""
    )
    words = ["it", "module", "seven", "the statement", "cat", "x and y"]
    rows = [{"q": f"Question {i}:", "last": words[i % 6]} for i in range(60)]
    (tmp_path / "words.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with quiet_harness():
        reference = packed.HFLM(str(qwen), device="cpu", dtype="float32")
    # lm-eval puts no space between question and answer
    pairs = [(row["q"], row["last"]) for row in rows]
    scored = reference.loglikelihood(asked("loglikelihood", pairs), disable_tqdm=True)
    logs = np.array([value for value, _ in scored])
    draws = np.random.default_rng(0).choice(logs, (20_000, len(logs))).mean(axis=1)
    low, high = np.quantile(-draws, [0.025, 0.975])
    report = evaluate_folder(
        qwen, ("mine_words",), include_path=own_tasks, out=tmp_path / "words.json"
    )
    metric = report["mine_words"].metric("perplexity")
    assert metric.low is not None and metric.high is not None
    assert np.log(metric.value) == pytest.approx(-logs.mean(), rel=1e-5)
    width = high - low
    assert np.log(metric.low) == pytest.approx(low, abs=0.1 * width)
    assert np.log(metric.high) == pytest.approx(high, abs=0.1 * width)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--tasks zz_*", r"no task, group or tag of lm-eval matches 'zz_\*'"),
        ("--tasks none/mine.yaml", "none/mine.yaml': no such file"),
        ("--tasks piqa --include-path none", "include_path: .*none is not a folder"),
        ("--tasks piqa --limit 1.5", "limit: 1.5 is not allowed"),
        ("--tasks piqa --batch-size auto:x", "batch_size: 'auto:x' is not allowed"),
        ("--tasks piqa --device gpu0", "device: 'gpu0' cannot be used on this machine"),
        ("--tasks piqa --dtype fp8", "dtype: 'fp8' is not allowed. Allowed: float32"),
        ("--tasks piqa --seed 1 --set seed=2", "--set seed: given by an option of its own"),
    ],
)
def test_wrong_harness_options_are_refused(qwen, words, message, tmp_path):
    with pytest.raises(ConfigError, match=message) as caught:
        kit("eval", qwen, *words.split(), "--output", tmp_path / "x.json")
    assert "Did you mean" not in str(caught.value)


def test_seed_selects_few_shot_examples_as_lm_eval(qwen, own_tasks, tmp_path):
    """The option `--seed N` of lm-eval also sets the seed that selects few-shot examples."""
    shots = {"num_fewshot": 2, "include_path": own_tasks}
    values = {}
    for seed in (1234, 7):
        manager = {"fewshot_random_seed": seed, "num_fewshot": 2, "log_samples": True}
        found = harness_results(qwen, ["mine_odd"], own_tasks, **manager)
        report = evaluate_folder(
            qwen, ("mine_odd",), seed=seed, out=tmp_path / f"{seed}.json", **shots
        )
        score = report["mine_odd"]
        assert score.metric("acc_norm").value == found["mine_odd"]["acc_norm,none"]
        values[seed] = score.metric("answer_bits_per_byte").value
    assert values[1234] != values[7]


def test_chat_and_generation_options_equal_lm_eval(qwen, own_tasks, tmp_path):
    """Compares the samples of the kit with those of lm-eval: prompts with chat turns, and generated
    texts of another length.
    """
    folder = shutil.copytree(qwen, tmp_path / "chat")
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    turn = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}[assistant] "
    tokenizer.chat_template = turn
    tokenizer.save_pretrained(folder)
    definition = (own_tasks / "mine.yaml").read_text()
    generates = definition.replace("mine_odd", "mine_text").replace(
        "multiple_choice", "generate_until"
    )
    generates = generates.replace(
        "doc_to_choice: choices\ndoc_to_target: gold", "doc_to_target: '{{choices[gold]}}'"
    ).replace("acc}, {metric: acc_norm", "exact_match")
    (own_tasks / "text.yaml").write_text(generates)
    expected = harness_results(
        folder,
        ["mine_text"],
        own_tasks,
        num_fewshot=1,
        apply_chat_template=True,
        fewshot_as_multiturn=True,
        gen_kwargs="max_gen_toks=7",
        samples_too=True,
    )
    words = ("--apply_chat_template", "--gen_kwargs", "max_gen_toks=7", "--num_fewshot", 1)
    given = ("--include_path", own_tasks, "--log_samples", "--output_path", tmp_path / "r.json")
    report = json.loads(kit("eval", folder, "--tasks", "mine_text", *words, *given, "--json"))
    assert report["scores"][0]["apply_chat_template"] is True
    lines = (tmp_path / "r.samples" / "samples_mine_text.jsonl").read_text().splitlines()
    found = {item["doc_id"]: item for item in map(json.loads, lines)}
    assert len(found) == len(expected) == len(ITEMS)
    for item in expected:
        own = found[item["doc_id"]]
        assert own["arguments"][0][0] == item["arguments"][0][0]
        assert own["resps"] == item["resps"]
        assert "[assistant]" in own["arguments"][0][0]
    with pytest.raises(
        ConfigError, match="apply_chat_template: the tokenizer has no chat template"
    ):
        kit("eval", qwen, "--tasks", "mine_text", "--apply-chat-template", *given[:2])


def test_batch_size_does_not_change_scores(qwen, own_tasks, tmp_path):
    found = []
    for size in ("1", "3", "auto:2"):
        given = ("--batch_size", size, "--num_fewshot", 0, "-o", tmp_path / f"{size}.json")
        text = kit(
            "eval", qwen, "--tasks", "mine_odd", "--include-path", own_tasks, *given, "--json"
        )
        found.append([each["value"] for each in json.loads(text)["scores"][0]["metrics"]])
    assert found[1] == pytest.approx(found[0]) and found[2] == pytest.approx(found[0])


# Text generation ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["qwen2", "gemma2", "mamba"])
def test_family_text_equals_transformers(kind, tokenizer, tmp_path):
    folder = write_model(tmp_path / kind, tokenizer, kind, **PLAIN.get(kind, {}))
    theirs: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = theirs("the cat", return_tensors="pt").input_ids
    made = model.generate(tokens, max_new_tokens=12, do_sample=False, repetition_penalty=1.3)
    expected = theirs.decode(made[0, tokens.shape[1] :], skip_special_tokens=True)
    options = {"num_tokens": 12, "repetition_penalty": 1.3}
    assert continue_text(folder, "the cat", **options) == expected
    words = ("--max_new_tokens", 12, "--temperature", 0, "--num_return_sequences", 2)
    text = kit("generate", folder, "the cat", *words, "--repetition-penalty", 1.3)
    assert text.count("the cat") == 2


# Model folders that cannot be loaded --------------------------------------------------------------


BERT = {"vocab_size": 300, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
LFS = "version https://git-lfs.github.com/spec/v1"


def broken(qwen: Path, folder: Path, how: str) -> Path:
    """Returns a copy of the model's folder with the defect that `how` names."""
    shutil.copytree(qwen, folder)
    weights = folder / "model.safetensors"
    if how == "wrapped":
        state = {f"_orig_mod.{name}": value for name, value in load_file(weights).items()}
        save_file(state, weights, metadata={"format": "pt"})
    elif how in ("code", "unknown", "t5"):
        config = json.loads((folder / "config.json").read_text())
        config["model_type"] = "t5" if how == "t5" else "mymodel"
        if how == "code":
            config["auto_map"] = {"AutoModelForCausalLM": "modeling_mymodel.MyModel"}
        (folder / "config.json").write_text(json.dumps(config))
    elif how == "bert":
        BertForMaskedLM(BertConfig(**BERT)).save_pretrained(folder)
    elif how == "headless":
        state = {key: value for key, value in load_file(weights).items() if "lm_head" not in key}
        save_file(state, weights, metadata={"format": "pt"})
        config = json.loads((folder / "config.json").read_text())
        config |= {"architectures": ["Qwen2Model"], "tie_word_embeddings": False}
        (folder / "config.json").write_text(json.dumps(config))
    elif how == "pointer":
        weights.write_text(f"{LFS}\noid sha256:{'0' * 64}\nsize 12345678\n")
    elif how == "without config":
        (folder / "config.json").unlink()
    elif how == "parent":
        folder.rename(folder.with_name("checkpoint-500"))
        folder.mkdir()
        folder.with_name("checkpoint-500").rename(folder / "checkpoint-500")
    else:
        weights.rename(folder / how)
    return folder


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("pytorch_model.bin", "pickled weights .*unpickling can run code.*save_pretrained"),
        ("model.fp16.safetensors", "a variant of the weights .*variant=NAME"),
        ("model-00001-of-00002.safetensors", "without model.safetensors.index.json"),
        ("wrapped", "'_orig_mod.', as of a model that torch.compile wraps"),
        ("code", r"Python code of its own \(modeling_mymodel.MyModel\), which the kit never runs"),
        ("unknown", "model_type 'mymodel' is not in transformers"),
        ("t5", "model_type 't5' is no decoder"),
        ("bert", "'BertForMaskedLM' is an encoder, which predicts masked tokens"),
        ("headless", "saved as Qwen2Model, without the output projection"),
        ("pointer", "model.safetensors: a pointer of Git LFS, .*`git lfs pull`"),
        ("without config", "It holds weights: copy config.json"),
        ("parent", "It holds 1 Hugging Face folder: give .*checkpoint-500"),
    ],
)
def test_unreadable_folder_error_names_the_defect(qwen, how, message, tmp_path, capfd):
    folder = broken(qwen, tmp_path / "model", how)
    for command in (("eval", folder, "--tasks", "piqa"), ("generate", folder)):
        with pytest.raises((ConfigError, DataError, RunError), match=message):
            kit(*command)
    assert "MISSING" not in capfd.readouterr().err, "transformers' own table of weights"


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("adapter_config.json", "an adapter of PEFT .*merge it into its model"),
        ("__0_0.distcp", "a distributed checkpoint of megatron-core"),
        ("zero_pp_rank_0_mp_rank_00_optim_states.pt", "a ZeRO checkpoint of DeepSpeed"),
        ("ckpt.pt", "a checkpoint of nanoGPT"),
        ("consolidated.00.pth", "a checkpoint of Meta's Llama code"),
    ],
)
def test_checkpoint_of_other_trainer_is_recognized(file, message, tmp_path):
    (tmp_path / file).write_bytes(b"")
    for command in (("eval", tmp_path), ("generate", tmp_path)):
        with pytest.raises(RunError, match=message):
            kit(*command)
    with pytest.raises(DataError, match=re.escape(message.split(" .*")[0])):
        kit("import", tmp_path, "--model", "demo", "--out", tmp_path / "out")
