"""Writes texts that continue a prompt, with the model of a run's checkpoint or of a Hugging Face
folder.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from cluster.record import counted
from kit.errors import ConfigError
from kit.evaluate.benchmarks import precision_of_dtype
from kit.interop.weights.other_trainers import check_safetensors, not_a_model
from kit.run import Run

DEFAULT_TOKENS = 100
"""Largest number of generated tokens, if the caller gives none."""


def continue_text(source: Run | str | Path, prompt: str = "", **options: Any) -> str:
    """Returns one text that continues a prompt: the first text that `continued_texts` yields.
    Options and errors are those of `continued_texts`.
    """
    return next(continued_texts(source, prompt, **options))


def continued_texts(
    source: Run | str | Path,
    prompt: str = "",
    *,
    num_texts: int = 1,
    step: int | None = None,
    num_tokens: int | None = None,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    repetition_penalty: float = 1.0,
    seed: int = 0,
    dtype: str = "float32",
    device: str = "cpu",
    tell: Callable[[str], object] = lambda text: None,
) -> Iterator[str]:
    """Yields `num_texts` continuations of a prompt, each of up to `num_tokens` tokens. A text is
    shorter if the model ends it. If `num_tokens` is None, it is 100, or less if the model's
    sequences have no room for 100. Text number i, from 0, is drawn with seed `seed` + i.

    The source is a run, or a Hugging Face folder with any decoder that transformers loads. `step`
    selects the checkpoint of a run, by default the newest. The whole model is on one device.

    At temperature 0, each token is the most likely token. At a higher temperature, each token is
    drawn from the `top_k` most likely tokens (0: from all tokens). Of these, only the fewest tokens
    with a total probability of at least `top_p` are used. `repetition_penalty` divides the positive
    logits of tokens that are already in the text, and multiplies their negative logits. `tell` is
    called with each piece of text, in whole words, as soon as the piece is written.

    Raises:
        ConfigError: An option is out of its range, or prompt and new tokens are longer than the
            model's sequences.
        CheckpointError, RunError, DataError: The model or its tokenizer cannot be read.
    """
    if (num_tokens is not None and num_tokens < 1) or temperature < 0 or not 0 < top_p <= 1:
        raise ConfigError(
            f"num_tokens {num_tokens}, temperature {temperature}, top_p {top_p}: not allowed. Give"
            " a token or more, a temperature from 0, and a top_p above 0 up to 1."
        )
    if top_k < 0 or repetition_penalty <= 0:
        raise ConfigError(
            f"top_k {top_k}, repetition_penalty {repetition_penalty}: not allowed. Give a top_k"
            " from 0, and a penalty above 0."
        )
    if dtype != "auto":
        precision_of_dtype(dtype)
    # A wrong source is refused before the imports, which take seconds.
    with _folder(source, step) as folder:
        import torch
        from transformers import TextStreamer

        from kit.evaluate.loading import (
            config_length,
            load_causal_model,
            named_device,
            precision_of,
        )

        place = named_device(device)
        precision = precision_of(folder) if dtype == "auto" else precision_of_dtype(dtype)
        model, tokenizer = load_causal_model(folder, precision)
        model.to(place)
    tokens = tokenizer.encode(prompt)
    if not tokens:
        ends = (tokenizer.bos_token_id, tokenizer.eos_token_id)
        tokens = [token for token in ends if token is not None][:1]
    if not tokens:
        raise ConfigError(
            "prompt: is empty, and the tokenizer has no token that begins or ends a text. Give a"
            " prompt."
        )
    num_tokens = _num_new_tokens(num_tokens, len(tokens), config_length(model.config))
    sampling: dict[str, Any] = {"temperature": temperature, "top_p": top_p, "top_k": top_k}
    if temperature == 0:
        # At temperature 0 nothing is sampled. None overrides the values of the folder's generation
        # config.
        sampling = dict.fromkeys(sampling)
    gpus = [place] if place.type == "cuda" else []
    tokens_1T = torch.tensor([tokens], device=place)
    for number in range(num_texts):
        pieces: list[str] = []

        def take(text: str, stream_end: bool = False, pieces: list[str] = pieces) -> None:
            pieces.append(text)
            tell(text)

        streamer: Any = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
        streamer.on_finalized_text = take
        with torch.random.fork_rng(devices=gpus):
            torch.manual_seed(seed + number)
            model.generate(
                tokens_1T,
                attention_mask=torch.ones_like(tokens_1T),
                max_new_tokens=num_tokens,
                pad_token_id=tokenizer.eos_token_id,
                do_sample=temperature > 0,
                repetition_penalty=repetition_penalty,
                streamer=streamer,
                **sampling,
            )
        yield "".join(pieces)


def _folder(
    source: Run | str | Path, step: int | None
) -> contextlib.AbstractContextManager[str | Path]:
    if isinstance(source, Run) or not is_hugging_face_folder(Path(source)):
        run = source if isinstance(source, Run) else _open_run(Path(source))
        step = run.checkpoints.manifest(run.checkpoints.step_or_newest(step)).step
        from kit.evaluate.loading import checkpoint_folder

        return checkpoint_folder(run, step)
    if step is not None:
        raise ConfigError(
            f"step {step}: {source} is a Hugging Face folder, which has one model. Leave it out."
        )
    check_safetensors(Path(source))
    return contextlib.nullcontext(source)


def _open_run(directory: Path) -> Run:
    """Opens the run of a directory.

    Raises:
        RunError: The directory is not a run. The message says what the directory holds instead.
    """
    if not (directory / "spec.json").exists():
        raise not_a_model(directory)
    return Run.open(directory)


def is_hugging_face_folder(path: Path) -> bool:
    """Returns whether a path is a folder with a `config.json`, but not a run directory."""
    return (path / "config.json").is_file() and not (path / "spec.json").exists()


def _num_new_tokens(asked: int | None, num_in_prompt: int, longest: int | None) -> int:
    """Returns the largest number of tokens to generate. `longest` is the number of tokens of the
    model's longest sequence. None: it has no limit.

    Raises:
        ConfigError: Prompt and new tokens are longer than the model's sequences.
    """
    room = math.inf if longest is None else longest - num_in_prompt
    number = int(max(1, min(DEFAULT_TOKENS, room))) if asked is None else asked
    if number > room:
        raise ConfigError(
            f"prompt: {counted(num_in_prompt, 'token')}, and {number:,} to write, are more than the"
            f" {longest:,} of a sequence of the model. Give a shorter prompt, or fewer"
            " --max-new-tokens."
        )
    return number
