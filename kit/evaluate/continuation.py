"""What a model writes: a prompt continued by a run's checkpoint or a Hugging Face folder, token
by token.
"""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kit.convert.hugging_face_config import load_spec
from kit.errors import ConfigError
from kit.run import Run


def continue_text(
    source: Run | str | Path,
    prompt: str = "",
    *,
    step: int | None = None,
    num_tokens: int = 100,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    tell: Callable[[str], object] = lambda text: None,
) -> str:
    """Returns what a model writes after a prompt, until it ends the text or has written
    `num_tokens`.

    The source is a run, of which `step` names the checkpoint (by default the newest), or a folder
    of Hugging Face's. With a temperature above 0 tokens are drawn, the same for the same seed, from
    the fewest that together have probability `top_p`; else each is the most likely one. `tell` gets
    each piece of text as it comes, whole words. The whole model is on the CPU, fp32.

    Raises:
        ConfigError: an option is out of its range, or prompt and tokens are longer than the model's
            sequences.
        CheckpointError, RunError, DataError: the model or its tokenizer cannot be read.
    """
    if num_tokens < 1 or temperature < 0 or not 0 < top_p <= 1:
        raise ConfigError(
            f"num_tokens {num_tokens}, temperature {temperature}, top_p {top_p}: not allowed. Give"
            " a token or more, a temperature from 0, and a top_p above 0 up to 1."
        )
    with _folder(source, step) as folder:  # what is refused is refused before seconds of imports
        import torch
        from transformers import TextStreamer

        from kit.evaluate.loading import load_model

        model, tokenizer = load_model(folder)
    start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    tokens = tokenizer.encode(prompt) or [start]
    longest = model.config.max_position_embeddings
    if len(tokens) + num_tokens > longest:
        raise ConfigError(
            f"prompt: {len(tokens):,} tokens, and {num_tokens:,} to write, are more than the"
            f" {longest:,} of a sequence of the model. Give a shorter one, or ask for fewer."
        )
    pieces: list[str] = []

    def take(text: str, stream_end: bool = False) -> None:
        pieces.append(text)
        tell(text)

    streamer: Any = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    streamer.on_finalized_text = take
    drawing: dict[str, Any] = {"temperature": temperature, "top_p": top_p, "top_k": 0}
    tokens_1T = torch.tensor([tokens])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model.generate(
            tokens_1T,
            attention_mask=torch.ones_like(tokens_1T),
            max_new_tokens=num_tokens,
            pad_token_id=tokenizer.eos_token_id,
            do_sample=temperature > 0,
            streamer=streamer,
            **(drawing if temperature > 0 else dict.fromkeys(drawing)),
        )
    return "".join(pieces)


def _folder(
    source: Run | str | Path, step: int | None
) -> contextlib.AbstractContextManager[str | Path]:
    if isinstance(source, Run) or not is_hugging_face_folder(Path(source)):
        run = source if isinstance(source, Run) else Run.open(source)
        step = run.checkpoints.manifest(run.checkpoints.step_or_newest(step)).step
        from kit.evaluate.loading import checkpoint_folder

        return checkpoint_folder(run, step)
    if step is not None:
        raise ConfigError(
            f"step {step}: {source} is a Hugging Face folder, which has one model. Leave it out."
        )
    load_spec(str(source))
    return contextlib.nullcontext(source)


def is_hugging_face_folder(path: Path) -> bool:
    """Returns whether a path is a folder with a `config.json`, and no run directory."""
    return (path / "config.json").is_file() and not (path / "spec.json").exists()
