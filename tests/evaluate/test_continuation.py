"""Text generation: greedy text equals that of transformers, sampled text is determined by its seed,
and text is streamed.
"""

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer

from kit.errors import CheckpointError, ConfigError, RunError
from kit.evaluate.continuation import continue_text
from kit.interop.weights.hugging_face import export_hugging_face
from kit.model import build_decoder
from tests.evaluate.conftest import OPINIONATED, kit

PROMPT = "the cat – and"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tokenizer) -> Path:
    """Returns the folder of a model with random weights. Such a model also generates incomplete
    UTF-8 characters.
    """
    decoder, folder = build_decoder(OPINIONATED["llama"]), tmp_path_factory.mktemp("model") / "tiny"
    return export_hugging_face(decoder, folder, tokenizer=tokenizer)


@pytest.mark.parametrize("begins", [True, False])
def test_greedy_text_equals_transformers(folder, tmp_path, begins):
    """Tested with a tokenizer that adds a begin token to texts, like Llama's, and with a tokenizer
    that does not.
    """
    copy = shutil.copytree(folder, tmp_path / "copy")
    if begins:
        tokenizer: Any = AutoTokenizer.from_pretrained(copy)
        tokenizer.add_special_tokens({"bos_token": "a"})
        post = TemplateProcessing(single="a $A", special_tokens=[("a", tokenizer.bos_token_id)])
        tokenizer.backend_tokenizer.post_processor = post
        tokenizer.save_pretrained(copy)
    tokenizer = AutoTokenizer.from_pretrained(copy)
    model: Any = AutoModelForCausalLM.from_pretrained(copy, dtype=torch.float32)
    for prompt in (PROMPT, "b"):
        tokens = tokenizer(prompt, return_tensors="pt").input_ids
        assert (tokens[0, 0] == tokenizer.bos_token_id) == begins
        made = model.generate(tokens, max_new_tokens=30, do_sample=False, pad_token_id=0)
        expected = tokenizer.decode(made[0, tokens.shape[1] :], skip_special_tokens=True)
        assert continue_text(copy, prompt, num_tokens=30) == expected


def test_sampled_text_is_streamed_and_follows_its_seed(folder):
    pieces: list[str] = []
    text = continue_text(folder, PROMPT, num_tokens=40, temperature=1.0, seed=3, tell=pieces.append)
    assert "".join(pieces) == text and len(pieces) > 5
    assert text == continue_text(folder, PROMPT, num_tokens=40, temperature=1.0, seed=3)
    assert text != continue_text(folder, PROMPT, num_tokens=40, temperature=1.0, seed=4)
    assert continue_text(folder, num_tokens=3), "from nothing too"


def test_generate_command_prints_text(folder):
    text = kit("generate", folder, PROMPT, "--tokens", "9", "--temperature", "0")
    assert text.startswith(PROMPT)
    assert "\x1b" not in text, "a model's text is shown, never obeyed"


def test_default_number_of_tokens_fits_the_model(folder):
    """`kit eval` recommends `kit generate RUN`. The model's sequences have 64 tokens."""
    assert continue_text(folder, PROMPT)


def test_impossible_generation_is_refused(folder, tmp_path):
    for wrong, message in (
        ({"num_tokens": 100}, "100 to write, are more than the 64 of a sequence.*--max-new-tokens"),
        ({"top_p": 0}, "top_p 0: not allowed"),
        ({"step": 5}, "step 5: .* is a Hugging Face folder"),
    ):
        with pytest.raises(ConfigError, match=message):
            continue_text(folder, PROMPT, **wrong)
    with pytest.raises(RunError):
        continue_text(tmp_path, PROMPT)


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_missing_checkpoint_is_refused_before_loading(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "kit.evaluate.loading", None)
    with pytest.raises(
        CheckpointError, match=rf"step 7: .*Complete steps: {run.checkpoints.newest()}\."
    ):
        continue_text(run, PROMPT, step=7)
