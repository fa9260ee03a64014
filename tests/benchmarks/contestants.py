"""The training loops that `train_speed` and `gpu` compare: same shapes, weights, batches and AdamW.

    python -m tests.benchmarks.contestants NAME   each line on standard input is a number of steps; each answer a line

Each runs in a process of its own, since the Trainer and a process group change the state of theirs, and only when told
to, so that several can take turns.
"""

import argparse
import dataclasses
import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from cluster.record import Record, field_doc
from kit.convert.hugging_face_config import config_of
from kit.convert.names import to_theirs
from kit.engines import build_engine
from kit.engines.adamw import adamw
from kit.engines.process_group import keep_freed_memory
from kit.errors import MissingPackageError
from kit.model import Decoder, build_decoder
from kit.plan import Plan
from kit.recipe import Recipe
from kit.spec import ModelSpec

NUM_BATCHES = 8
# No weight decay, since the Trainer spares norms from it and the kit does not: so that all train the same model.
RECIPE = Recipe(data="memory", num_steps=1, learning_rate=1e-3, weight_decay=0.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup(Record):
    """What all train, and on what."""

    spec: ModelSpec = field_doc("the model")
    batch_size: int = field_doc("sequences of one step")
    device: Literal["cpu", "cuda"] = field_doc("where", default="cpu")
    precision: Literal["fp32", "bf16"] = field_doc("of the products; weights and moments are fp32", default="fp32")
    compile: bool = field_doc("by torch.compile", default=False)
    recompute: Literal["none", "selective"] = field_doc("by the kit; the others keep all activations", default="none")

    @property
    def plan(self) -> Plan:
        """The kit's plan for it, on one device."""
        return Plan(
            global_batch_size=self.batch_size, micro_batch_size=self.batch_size, precision=self.precision,
            compile=self.compile, recompute=self.recompute,
        )  # fmt: skip


DEMO = Setup(spec=ModelSpec.preset("demo"), batch_size=16)


class Turns:
    """Runs the steps that standard input asks for, and says how long they took."""

    def __init__(self) -> None:
        self.left = 0

    def wait(self) -> None:
        """Waits for the next turn; ends the process when there is none."""
        order = sys.stdin.readline()
        if not order:
            sys.exit(0)
        self.steps = self.left = int(order)
        self.wall_s, self.cpu_s = time.perf_counter(), time.process_time()

    def step_done(self, loss: float | Tensor) -> None:
        """Must be called after each step with its loss. The last of a turn reports, and waits for the next turn."""
        self.left -= 1
        if self.left:
            return
        value = float(torch.as_tensor(loss).detach())  # waits for an accelerator
        wall_s, cpu_s = time.perf_counter() - self.wall_s, time.process_time() - self.cpu_s
        answer = {"step_s": wall_s / self.steps, "step_cpu_s": cpu_s / self.steps, "loss": value}
        if torch.cuda.is_available():
            answer["memory_bytes"] = torch.cuda.max_memory_allocated()
        print(json.dumps(answer), flush=True)
        self.wait()


def batches(setup: Setup) -> Tensor:
    """Returns the batches in memory, int64 [N, B, T + 1]. Random tokens: the time of a step does not depend on them."""
    shape = (NUM_BATCHES, setup.batch_size, setup.spec.sequence_length + 1)
    return torch.randint(setup.spec.vocab_size, shape, generator=torch.Generator().manual_seed(0))


def kit(turns: Turns, setup: Setup) -> None:
    """The kit's native engine, as one rank of a job runs it."""
    _kit(turns, setup, setup.plan)


def deepspeed_zero0(turns: Turns, setup: Setup) -> None:
    """The kit's DeepSpeed engine, as one rank of a job runs it, without ZeRO."""
    _kit(turns, setup, setup.plan.replace(engine="deepspeed", compile=False))


def deepspeed_zero1(turns: Turns, setup: Setup) -> None:
    """The same with ZeRO 1, as in the Frontier recipe."""
    _kit(turns, setup, setup.plan.replace(engine="deepspeed", compile=False, zero_stage=1))


def _kit(turns: Turns, setup: Setup, plan: Plan) -> None:
    backend = "cpu:gloo,cuda:nccl" if setup.device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # pyright: ignore[reportPrivateImportUsage]
    engine = build_engine(setup.spec, plan, RECIPE, torch.device(setup.device))
    data = batches(setup)
    turns.wait()
    for samples in itertools.cycle(data):
        loss, _ = engine.train_step(samples, RECIPE.learning_rate)
        turns.step_done(loss)


def plain(turns: Turns, setup: Setup) -> None:
    """The shortest loop over the kit's model with the fast parts of torch, as nanoGPT: fused AdamW and attention."""
    model: Any = build_decoder(setup.spec, seed=RECIPE.seed).to(setup.device)
    optimizer = adamw(model.parameters(), RECIPE)
    data = batches(setup).to(setup.device)
    model = torch.compile(model) if setup.compile else model
    half = setup.precision == "bf16"
    turns.wait()
    for samples in itertools.cycle(data):
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(setup.device, torch.bfloat16, enabled=half):
            logits_BTV = model(samples[:, :-1])
            loss = F.cross_entropy(logits_BTV.flatten(0, 1).float(), samples[:, 1:].reshape(-1))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        turns.step_done(loss)


def transformers(turns: Turns, setup: Setup) -> None:
    """Hugging Face's model of the same shapes and weights under its Trainer, without evaluation, saving or reports."""
    try:
        from transformers import Trainer, TrainerCallback, TrainingArguments
    except ImportError as error:
        raise MissingPackageError("transformers", "eval", "Comparing speed with its Trainer") from error

    arguments = TrainingArguments(
        output_dir="unused",
        max_steps=10**6,
        per_device_train_batch_size=setup.batch_size,
        optim="adamw_torch_fused",
        learning_rate=RECIPE.learning_rate,
        adam_beta1=RECIPE.beta1,
        adam_beta2=RECIPE.beta2,
        adam_epsilon=RECIPE.eps,
        weight_decay=RECIPE.weight_decay,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=setup.device == "cpu",
        bf16=setup.precision == "bf16",
        torch_compile=setup.compile,
        dataloader_pin_memory=False,
        remove_unused_columns=False,
        train_sampling_strategy="sequential",
    )
    # `shift_labels` are targets as they are, so that all T positions count, as in the other loops.
    rows = [{"input_ids": row[:-1], "labels": row[1:], "shift_labels": row[1:]} for row in batches(setup).flatten(0, 1)]
    model, losses = theirs(build_decoder(setup.spec, seed=RECIPE.seed)), []
    model.register_forward_hook(lambda module, inputs, output: losses.append(output.loss.detach()))

    class TakeTurns(TrainerCallback):
        def on_train_begin(self, *args, **kwargs) -> None:
            turns.wait()

        def on_step_end(self, *args, **kwargs) -> None:
            loss = losses.pop()
            turns.step_done(loss)

    Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[TakeTurns()]).train()  # type: ignore


def theirs(decoder: Decoder) -> Any:
    """Returns transformers' model of the same shapes and weights: its Llama, or its GPT-2."""
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    config = {**config_of(decoder.spec), "use_cache": False}
    is_llama = decoder.spec.family == "llama"
    model = LlamaForCausalLM(LlamaConfig(**config)) if is_llama else GPT2LMHeadModel(GPT2Config(**config))
    weights = to_theirs(decoder.spec, ((name, weight.detach()) for name, weight in decoder.named_parameters()))
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)  # tied
    return model


CONTESTANTS = {function.__name__: function for function in (kit, plain, transformers, deepspeed_zero0, deepspeed_zero1)}


def main() -> None:
    """Runs one contestant until standard input ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=CONTESTANTS)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--setup", type=Path, help="file; default: the demo model on the CPU")
    parser.add_argument("--keep-freed-memory", action="store_true", help="as the kit's ranks do")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.keep_freed_memory:
        keep_freed_memory()
    CONTESTANTS[options.name](Turns(), Setup.read(options.setup) if options.setup else DEMO)


if __name__ == "__main__":
    main()
