"""The training loops that `train_speed` compares: same shapes, weights, batches and AdamW, fp32, on a GPU or the CPU.

    python -m kit.bench.contestants NAME     each line on standard input is a number of steps to run; each answer a line

Each runs in a process of its own, since the Trainer and a process group change the state of theirs, and only when told
to, so that several can take turns.
"""

import argparse
import itertools
import json
import sys
import time

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from kit.convert.hugging_face import config_of
from kit.convert.names import to_theirs
from kit.engines import build_engine
from kit.engines.adamw import adamw
from kit.errors import MissingPackageError
from kit.model import Decoder, build_decoder
from kit.plan import Plan
from kit.recipe import Recipe
from kit.spec import ModelSpec
from kit.train import keep_freed_memory

BATCH_SIZE = 16
NUM_BATCHES = 8
SPEC = ModelSpec.preset("demo")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# No weight decay, since the Trainer spares norms from it and the kit does not: so that all train the same model.
RECIPE = Recipe(data="memory", num_steps=1, learning_rate=1e-3, weight_decay=0.0)


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
        loss = float(torch.as_tensor(loss).detach())  # waits for a GPU
        wall_s, cpu_s = time.perf_counter() - self.wall_s, time.process_time() - self.cpu_s
        answer = {
            "step_s": wall_s / self.steps,
            "step_cpu_s": cpu_s / self.steps,
            "loss": loss,
        }
        print(json.dumps(answer), flush=True)
        self.wait()


def batches() -> Tensor:
    """Returns the batches in memory, int64 [N, B, T + 1]. Random tokens: the time of a step does not depend on them."""
    shape = (NUM_BATCHES, BATCH_SIZE, SPEC.sequence_length + 1)
    return torch.randint(SPEC.vocab_size, shape, generator=torch.Generator().manual_seed(0))


def kit(turns: Turns) -> None:
    """The kit's native engine, as one rank of a job runs it."""
    _kit(turns, Plan(global_batch_size=BATCH_SIZE, micro_batch_size=BATCH_SIZE))


def deepspeed_zero0(turns: Turns) -> None:
    """The kit's DeepSpeed engine, as one rank of a job runs it, without ZeRO."""
    _kit(turns, Plan(global_batch_size=BATCH_SIZE, micro_batch_size=BATCH_SIZE, engine="deepspeed"))


def deepspeed_zero1(turns: Turns) -> None:
    """The same with ZeRO 1, as in the Frontier recipe."""
    _kit(turns, Plan(global_batch_size=BATCH_SIZE, micro_batch_size=BATCH_SIZE, engine="deepspeed", zero_stage=1))


def _kit(turns: Turns, plan: Plan) -> None:
    backend = "gloo" if DEVICE.type == "cpu" else "cpu:gloo,cuda:nccl"
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    engine = build_engine(SPEC, plan, RECIPE, DEVICE)
    data = batches()
    turns.wait()
    for samples in itertools.cycle(data):
        loss, _ = engine.train_step(samples, RECIPE.learning_rate)
        turns.step_done(loss)


def plain(turns: Turns) -> None:
    """The shortest loop over the kit's model with the fast parts of torch: fused AdamW, fused attention."""
    model = build_decoder(SPEC, seed=RECIPE.seed).to(DEVICE)
    optimizer = adamw(model.parameters(), RECIPE)
    data = batches().to(DEVICE)
    turns.wait()
    for samples in itertools.cycle(data):
        optimizer.zero_grad(set_to_none=True)
        logits_BTV = model(samples[:, :-1])
        loss = F.cross_entropy(logits_BTV.view(-1, SPEC.vocab_size), samples[:, 1:].reshape(-1))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        turns.step_done(loss)


def transformers(turns: Turns) -> None:
    """Hugging Face's LlamaForCausalLM under its Trainer, without evaluation, saving or reports."""
    try:
        from transformers import Trainer, TrainerCallback, TrainingArguments
    except ImportError as error:
        raise MissingPackageError("transformers", "eval", "Comparing speed with its Trainer") from error

    arguments = TrainingArguments(
        output_dir="unused",
        max_steps=10**6,
        per_device_train_batch_size=BATCH_SIZE,
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
        use_cpu=DEVICE.type == "cpu",
        dataloader_pin_memory=False,
        remove_unused_columns=False,
        train_sampling_strategy="sequential",
    )
    # `shift_labels` are targets as they are, so that all T positions count, as in the other loops.
    rows = [{"input_ids": row[:-1], "labels": row[1:], "shift_labels": row[1:]} for row in batches().flatten(0, 1)]
    model, losses = llama(build_decoder(SPEC, seed=RECIPE.seed)), []
    model.register_forward_hook(lambda module, inputs, output: losses.append(output.loss.detach()))

    class TakeTurns(TrainerCallback):
        def on_train_begin(self, *args, **kwargs) -> None:
            turns.wait()

        def on_step_end(self, *args, **kwargs) -> None:
            loss = losses.pop()
            turns.step_done(loss)

    Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[TakeTurns()]).train()  # type: ignore


def llama(decoder: Decoder):
    """Returns transformers' model of the same shapes and weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**{**config_of(decoder.spec), "use_cache": False}))
    model.load_state_dict(
        to_theirs(decoder.spec, ((name, weight.detach()) for name, weight in decoder.named_parameters()))
    )
    return model


CONTESTANTS = {function.__name__: function for function in (kit, plain, transformers, deepspeed_zero0, deepspeed_zero1)}


def main() -> None:
    """Runs one contestant until standard input ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=CONTESTANTS)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--keep-freed-memory", action="store_true", help="as the kit's ranks do")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.keep_freed_memory:
        keep_freed_memory()
    CONTESTANTS[options.name](Turns())


if __name__ == "__main__":
    main()
