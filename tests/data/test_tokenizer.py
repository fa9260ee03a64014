"""Tokenizers: exact vocabulary sizes, lossless round trips, and equality with the libraries that
define their formats.
"""

import _thread
import json
import signal
import threading

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from kit.data.tokenizer import END_OF_TEXT, load_tokenizer, read_tokenizer, train_tokenizer
from kit.errors import DataError
from tests.interop.test_exported_tokenizers import LLAMA, TEXTS
from tests.interop.test_exported_tokenizers import trained as trained_sentencepiece

QUOTED = f"quoted {END_OF_TEXT} inside"
SAMPLES = ["", "plain words", "tabs\tand\r\nlines  ", QUOTED, "日本語 é 🙂 \x00", "12 345"]


@pytest.fixture(scope="module")
def trained():
    return train_tokenizer(TEXTS, 400)


@pytest.fixture(scope="module")
def sentencepiece_model(tmp_path_factory):
    file = tmp_path_factory.mktemp("sentencepiece") / "tokenizer.model"
    file.write_bytes(trained_sentencepiece(**LLAMA).data)
    return file


def test_trained_vocabulary_has_the_exact_size(trained):
    assert trained.vocab_size == 400
    assert (trained.eos_id, trained.decode([trained.eos_id])) == (0, END_OF_TEXT)
    assert train_tokenizer(TEXTS, 257).vocab_size == 257
    assert train_tokenizer(iter(TEXTS), 400).sha256 == trained.sha256, "deterministic"
    assert train_tokenizer(TEXTS[:50], 400).sha256 != trained.sha256


@settings(deadline=None)
@given(st.text())
def test_any_text_round_trips(trained, text):
    ids = trained.encode(text)
    assert trained.decode(ids) == text
    assert all(0 < token < trained.vocab_size for token in ids)


def test_quoted_special_tokens_are_encoded_as_text(trained):
    """A special token quoted in a text is encoded as plain text. Each digit is a token of its
    own.
    """
    ids = trained.encode(f"x{END_OF_TEXT}y")
    assert trained.eos_id not in ids and trained.decode(ids) == f"x{END_OF_TEXT}y"
    assert trained.eos_id not in trained.encode_batch([END_OF_TEXT])[0]
    assert len(trained.encode("2024")) == 4


def test_batch_and_stored_tokenizer_give_equal_ids(trained, sentencepiece_model, tmp_path):
    for tokenizer in (trained, load_tokenizer(sentencepiece_model)):
        file, ids = tmp_path / tokenizer.file_name, tokenizer.encode_batch(SAMPLES)
        assert ids == [tokenizer.encode(text) for text in SAMPLES]
        file.write_bytes(tokenizer.data)
        again = read_tokenizer(file, tokenizer.eos_id)
        assert again.encode_batch(SAMPLES) == ids and again.sha256 == tokenizer.sha256
        assert (again.eos_id, again.vocab_size) == (tokenizer.eos_id, tokenizer.vocab_size)


def test_sentencepiece_ids_equal_the_library(sentencepiece_model):
    tokenizer = load_tokenizer(sentencepiece_model)
    reference = sentencepiece.SentencePieceProcessor(model_file=str(sentencepiece_model))
    assert (tokenizer.vocab_size, tokenizer.eos_id) == (400, reference.eos_id())
    for text in (*SAMPLES, *TEXTS[:5], "ends </s> here"):
        assert tokenizer.encode(text) == reference.encode(text)
        assert tokenizer.eos_id not in tokenizer.encode(text)
    assert tokenizer.decode(tokenizer.encode(TEXTS[0])) == TEXTS[0]


def test_hugging_face_tokenizer_folder_is_read(trained, tmp_path):
    transformers = pytest.importorskip("transformers")
    (tmp_path / "trained.json").write_bytes(trained.data)
    wrapper = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "trained.json"), eos_token=END_OF_TEXT, model_max_length=8
    )
    wrapper.save_pretrained(tmp_path / "folder")
    tokenizer = load_tokenizer(tmp_path / "folder")
    assert tokenizer.eos_id == 0
    for text in TEXTS[:5]:
        assert tokenizer.encode(text) == wrapper.encode(text, add_special_tokens=False)


def test_older_hugging_face_tokenizer_folder_is_read(trained, tmp_path):
    transformers = pytest.importorskip("transformers")
    model = json.loads(trained.data)["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = "".join(" ".join(pair) + "\n" for pair in model["merges"])
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + merges)
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    tokenizer = load_tokenizer(tmp_path)
    reference = transformers.GPT2TokenizerFast.from_pretrained(tmp_path)
    assert (tokenizer.vocab_size, tokenizer.eos_id) == (400, 0)
    assert tokenizer.encode(TEXTS[0]) == reference.encode(TEXTS[0], add_special_tokens=False)


def test_end_token_is_read_from_tokenizer_config(trained, tmp_path):
    unknown = trained.data.replace(END_OF_TEXT.encode(), b"<stop>")
    (tmp_path / "tokenizer.json").write_bytes(unknown)
    refused = "tokenizer.json: no end-of-text token: looked for <.endoftext.>.*tokenizer_config"
    with pytest.raises(DataError, match=refused):
        load_tokenizer(tmp_path / "tokenizer.json")
    for token in ("<stop>", {"content": "<stop>"}):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": token}))
        assert load_tokenizer(tmp_path).eos_id == 0


def test_unusable_tokenizers_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match="absent.json: no such file"):
        load_tokenizer(tmp_path / "absent.json")
    with pytest.raises(DataError, match="tokenizer 'nobody/nothing': .* no such repository"):
        load_tokenizer("nobody/nothing")
    for name in ("tokenizer.json", "tokenizer.model"):
        (tmp_path / name).write_bytes(b"{}")
        with pytest.raises(DataError, match=f"{name}: .*not a"):
            load_tokenizer(tmp_path / name)


def test_tokenizer_training_ends_at_ctrl_c():
    """Ctrl-C ends the training of a tokenizer. An exception in the iterator of texts is
    raised too.
    """
    is_told, woken = threading.Event(), []

    def texts():
        yield "some text " * 100
        _thread.interrupt_main()
        woken.append(is_told.wait(60))
        yield "more"

    def broken():
        yield "some text"
        raise DataError("line 2 is torn")

    # SIGINT is ignored in a process started with `&`
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            train_tokenizer(texts(), 260)
    finally:
        signal.signal(signal.SIGINT, before)
    assert not woken, "the end of the texts is not waited for"
    is_told.set()
    with pytest.raises(DataError, match="line 2 is torn"):
        train_tokenizer(broken(), 260)
