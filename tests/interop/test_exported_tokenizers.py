"""The tokenizer in an exported model folder, loaded with transformers, gives the token ids of
training. If it cannot, no tokenizer is exported.
"""

import inspect
import io
import json
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tokenizers
import transformers
from sentencepiece import sentencepiece_model_pb2

from kit.data import load_tokenizer
from kit.data.tokenizer import (
    END_OF_TEXT,
    BytePairTokenizer,
    SentencePieceTokenizer,
    Tokenizer,
    train_tokenizer,
)
from kit.errors import DataError
from kit.interop.weights.hugging_face import HARD_TEXTS, export_hugging_face
from kit.model import build_decoder
from tests.support import distinct_models

TEXTS = inspect.getsource(textwrap).split("\n\n")
LLAMA = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
"""Training options of the SentencePiece tokenizers of LLaMA and Mistral."""


def trained(texts: list[str] = TEXTS, **options: Any) -> SentencePieceTokenizer:
    stream = io.BytesIO()
    chosen = {"model_type": "bpe", "byte_fallback": True, "vocab_size": 400, "minloglevel": 2}
    chosen |= options
    chosen |= {"sentence_iterator": iter(texts), "model_writer": stream}
    sentencepiece.SentencePieceTrainer.train(**chosen)
    return SentencePieceTokenizer(stream.getvalue())


def exported(tokenizer: Tokenizer, folder: Path, family: str = "llama") -> Any:
    """Exports a tokenizer to a folder. Returns it as transformers loads it."""
    spec = getattr(distinct_models, family.upper()).replace(vocab_size=500)
    export_hugging_face(build_decoder(spec), folder, tokenizer=tokenizer)
    return transformers.AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize(
    "options",
    [
        LLAMA,
        {**LLAMA, "add_dummy_prefix": False, "user_defined_symbols": ["<sep>", "\n\n"]},
        {**LLAMA, "byte_fallback": False},
        {},
    ],
    ids=["LLaMA's", "symbols", "no bytes", "sentencepiece's own defaults"],
)
def test_exported_sentencepiece_bpe_gives_equal_ids(options: dict, tmp_path: Path) -> None:
    tokenizer = trained(**options)
    theirs = exported(tokenizer, tmp_path / "model")
    texts = [*HARD_TEXTS, *TEXTS, "x</s>y", "<s>", "<0x0A>", "a<sep>b<sep>", "▁a ▁"]
    assert [theirs(text)["input_ids"] for text in texts] == tokenizer.encode_batch(texts)
    assert theirs.eos_token_id == tokenizer.eos_id
    assert (tmp_path / "model" / "tokenizer.model").read_bytes() == tokenizer.data
    if options is LLAMA:
        ids = tokenizer.encode_batch(texts)
        assert [theirs.decode(each) for each in ids] == [tokenizer.decode(each) for each in ids]


def with_pieces(
    tokenizer: SentencePieceTokenizer, pieces: dict[str, float]
) -> SentencePieceTokenizer:
    """Returns a SentencePiece model in which the last pieces are replaced by `pieces`, each with
    its score.
    """
    model = sentencepiece_model_pb2.ModelProto.FromString(tokenizer.data)
    for place, (piece, score) in zip(reversed(model.pieces), pieces.items(), strict=False):
        place.piece, place.score = piece, score
    return SentencePieceTokenizer(model.SerializeToString())


def test_spaces_with_equal_scores_merge_from_the_left(tmp_path: Path) -> None:
    """In Mistral's model all pieces of spaces have one score."""
    spaces = {"▁" * length: -1e9 for length in (2, 4, 8, 5, 16, 6, 12, 13, 10, 14, 3, 9, 7, 11)}
    tokenizer = with_pieces(trained(**LLAMA), spaces)
    theirs = exported(tokenizer, tmp_path / "model")
    for length in range(60):
        text = " " * length + "x" + " " * (length // 2) + "y"
        assert theirs(text)["input_ids"] == tokenizer.encode(text)


def test_unigram_export_is_refused_if_ties_differ(tmp_path: Path) -> None:
    """The exported tokenizer adds scores in another precision than SentencePiece. In a row of stars
    it may therefore exchange the pieces `**` and `*`.
    """
    alphabet = [chr(code) for code in range(33, 127)]
    lines = [line for text in TEXTS for line in text.splitlines()]
    plain = [re.sub(r"(.)\1+", r"\1", line) for line in lines] + alphabet
    options = {"model_type": "unigram", "vocab_size": 500, "character_coverage": 1.0}
    tokenizer = trained(plain, **options, **LLAMA)
    theirs = exported(tokenizer, tmp_path / "model")
    assert [theirs(text)["input_ids"] for text in HARD_TEXTS] == tokenizer.encode_batch(HARD_TEXTS)
    with pytest.raises(DataError, match=r"reads 'Title.n[*]+' as .* of [\d,]+ texts differ"):
        exported(with_pieces(tokenizer, {"**": -6.61}), tmp_path / "runs")


def test_unsupported_tokenizer_is_refused_before_writing(tmp_path: Path) -> None:
    tokenizer = trained(**LLAMA, user_defined_symbols=["<sep>"])
    with pytest.raises(DataError, match=r"reads '.*<sep>.*' as the token ids \[.*in Python"):
        exported(tokenizer, tmp_path / "model")
    assert not list(tmp_path.iterdir())
    with pytest.raises(DataError, match="a sentencepiece model of type WORD"):
        exported(trained(model_type="word", byte_fallback=False), tmp_path / "model")


@pytest.mark.parametrize("family", ["llama", "gpt"])
def test_quoted_special_tokens_stay_text_after_export(family: str, tmp_path: Path) -> None:
    tokenizer = train_tokenizer(TEXTS, 400)
    theirs = exported(tokenizer, tmp_path / "model", family)
    own = load_tokenizer(tmp_path / "model")
    texts = [*HARD_TEXTS, f"quoted {END_OF_TEXT} inside"]
    ids = [theirs(text)["input_ids"] for text in texts]
    assert ids == tokenizer.encode_batch(texts) == own.encode_batch(texts)
    assert (tmp_path / "model" / "tokenizer.json").read_bytes() == tokenizer.data
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert theirs.eos_token_id == tokenizer.eos_id == config["eos_token_id"]
    asked = theirs(END_OF_TEXT, split_special_tokens=False)["input_ids"]
    assert asked == [tokenizer.eos_id], "whoever wants it"


def test_exported_tokenizer_neither_adds_nor_truncates(tmp_path: Path) -> None:
    """The kit adds no padding or template to a training text, so a trained model has never seen
    them.
    """
    trained = train_tokenizer(TEXTS, 400)
    other = tokenizers.Tokenizer.from_str(trained.data.decode())
    other.enable_truncation(max_length=3)
    other.enable_padding(length=64)
    template = {"single": f"{END_OF_TEXT} $A", "special_tokens": [(END_OF_TEXT, 0)]}
    other.post_processor = tokenizers.processors.TemplateProcessing(**template)
    tokenizer = BytePairTokenizer(other.to_str().encode())
    theirs = exported(tokenizer, tmp_path / "model")
    ids = [theirs(text)["input_ids"] for text in HARD_TEXTS]
    assert ids == tokenizer.encode_batch(HARD_TEXTS) == trained.encode_batch(HARD_TEXTS)
    assert json.loads((tmp_path / "model" / "tokenizer.json").read_text())["truncation"] is None
