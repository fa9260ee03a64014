"""What a model writes: transformers' own greedy text, drawn text by its seed, and as it comes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from kit.commands.app import app
from kit.convert.hugging_face import export_hugging_face
from kit.errors import ConfigError, RunError
from kit.evaluate.continuation import continue_text
from kit.model import build_decoder
from kit.spec import ModelSpec

PROMPT = "the cat – and"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_dataset) -> Path:
    """A model of random weights, which therefore writes broken characters too, and a tokenizer
    of bytes.
    """
    spec = ModelSpec.llama(
        name="tiny",
        num_layers=2,
        hidden_size=32,
        num_heads=4,
        num_kv_heads=2,
        ffn_hidden_size=64,
        vocab_size=tiny_dataset.vocab_size,
        sequence_length=96,
    )
    decoder = build_decoder(spec, seed=1)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.mul_(4 if parameter.ndim == 2 else 1)
    return export_hugging_face(
        decoder, tmp_path_factory.mktemp("model") / "tiny", tokenizer=tiny_dataset.tokenizer()
    )


def test_the_most_likely_text_is_transformers(folder: Path, tiny_dataset) -> None:
    import transformers

    tokenizer = tiny_dataset.tokenizer()
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32
    ).eval()
    tokens = torch.tensor([[tokenizer.start_id, *tokenizer.encode(PROMPT)]])
    with torch.no_grad():
        theirs = model.generate(
            tokens,
            max_new_tokens=30,
            do_sample=False,
            eos_token_id=tokenizer.eos_id,
            pad_token_id=0,
        )
    new = [token for token in theirs[0, tokens.shape[1] :].tolist() if token != tokenizer.eos_id]
    assert (
        continue_text(folder, PROMPT, num_tokens=30)
        == tokenizer.decode([*tokenizer.encode(PROMPT), *new])[len(PROMPT) :]
    )


def test_text_comes_in_whole_characters_and_by_its_seed(folder: Path) -> None:
    pieces: list[str] = []
    text = continue_text(folder, PROMPT, num_tokens=40, temperature=1.0, seed=3, tell=pieces.append)
    assert "".join(pieces) == text and len(pieces) > 5
    assert text == continue_text(folder, PROMPT, num_tokens=40, temperature=1.0, seed=3)
    assert text != continue_text(folder, PROMPT, num_tokens=40, temperature=1.0, seed=4)
    assert continue_text(folder, num_tokens=3), "from nothing too"


def test_the_command_writes_it(folder: Path) -> None:
    done = CliRunner().invoke(
        app, ["generate", str(folder), PROMPT, "--tokens", "9", "--temperature", "0"]
    )
    assert done.exit_code == 0 and done.output.startswith(PROMPT)
    assert "\x1b" not in done.output, "a model's text is shown, never obeyed"


def test_what_cannot_be_written_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="100 to write, are more than the 96 of a sequence"):
        continue_text(folder, PROMPT)
    with pytest.raises(ConfigError, match="top_p 0: not allowed"):
        continue_text(folder, PROMPT, top_p=0)
    with pytest.raises(ConfigError, match="step 5: .* is a Hugging Face folder"):
        continue_text(folder, PROMPT, step=5)
    with pytest.raises(RunError):
        continue_text(tmp_path, PROMPT)
