"""Converts text to tokens. Exports the corpus, the tokenizer, the token files, and the tokens of
each training sample.
"""

from kit.data.build import build_dataset
from kit.data.corpus import Corpus
from kit.data.dataset import Dataset
from kit.data.mix import mix_text, resolve_paths, rounded_weights, shares, training_samples
from kit.data.samples import Samples
from kit.data.token_file import TokenFile
from kit.data.tokenizer import Tokenizer, load_tokenizer, train_tokenizer

__all__ = [
    "Corpus",
    "Dataset",
    "Samples",
    "TokenFile",
    "Tokenizer",
    "build_dataset",
    "load_tokenizer",
    "resolve_paths",
    "mix_text",
    "rounded_weights",
    "shares",
    "train_tokenizer",
    "training_samples",
]
