"""The training loops that the benchmarks `train_speed` and `gpu` compare. All loops have equal
shapes, weights, batches and AdamW.

    python -m tests.bench.contestants NAME THREADS [--keep-freed-memory]

Each line on standard input is a number of steps to train (one turn). After each turn the program
prints one line of JSON with times, losses and memory.

Each loop runs in its own process, because the Trainer and a process group change the state of their
process. It trains only when a turn is requested, so several loops can alternate. The working
directory must hold the file `SETUP`, which describes model, batch and device.
"""

import dataclasses
import itertools
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from cluster.record import Record, field_doc
from kit.config.plan import Plan
from kit.config.recipe import Recipe
from kit.config.spec import ModelSpec
from kit.engines.build import build_engine
from kit.engines.engine import adamw
from kit.engines.process_group import keep_freed_memory
from kit.interop.weights.hugging_face_config import config_of
from kit.interop.weights.weights import to_hugging_face
from kit.model import Decoder, empty_decoder, initial_weight

NUM_BATCHES = 8
SETUP = Path("setup.json")
# The weight decay is 0, because the Trainer excludes norms from weight decay and the kit does not.
# Without weight decay all loops train the same model.
RECIPE = Recipe(data="memory", num_steps=1, learning_rate=1e-4, weight_decay=0.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup(Record):
    """Model, batch and device that all contestants train with."""

    spec: ModelSpec = field_doc("the model")
    batch_size: int = field_doc("sequences of one step")
    micro_batches: int = field_doc("forward and backward passes of one step", default=1)
    device: Literal["cpu", "cuda"] = field_doc("where", default="cpu")
    precision: Literal["fp32", "bf16"] = field_doc(
        "of the products; weights and moments are fp32", default="fp32"
    )
    compile: bool = field_doc("by torch.compile", default=False)

    @property
    def micro_batch_size(self) -> int:
        """Number of sequences in one forward and backward pass."""
        return self.batch_size // self.micro_batches

    @property
    def plan(self) -> Plan:
        """The kit's plan of this setup on one device."""
        return Plan(
            global_batch_size=self.batch_size,
            micro_batch_size=self.micro_batch_size,
            precision=self.precision,
            compile=self.compile,
        )


SHAPES = {
    "checkpoint-26m": (6, 512, 8, 8, 1536, 8192, 256),
    "llama-100m": (12, 768, 12, 12, 2048, 16_384, 256),
    "llama-1b": (16, 2048, 32, 8, 8192, 32_000, 2048),
    "tiny": (2, 64, 4, 4, 128, 4096, 64),
}
"""Shapes of the Llama models by name: (layers, hidden size, heads, key/value heads, size of the
feed-forward block, vocabulary size, sequence length)."""


def llama(name: str) -> ModelSpec:
    """Returns the Llama model with the shape `name` of SHAPES."""
    layers, hidden, heads, kv_heads, ffn, vocab, length = SHAPES[name]
    return ModelSpec.llama(
        name=name,
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        ffn_hidden_size=ffn,
        vocab_size=vocab,
        sequence_length=length,
    )


DEMO = Setup(spec=ModelSpec.preset("demo"), batch_size=16)
LARGER = Setup(spec=llama("llama-100m"), batch_size=2)
"""Setup with a model of 110M parameters. Matrix products take nearly all of its step time."""


class Turns:
    """Trains the numbers of steps that standard input requests, and prints their times, losses and
    memory. One request is a turn.
    """

    def __init__(self) -> None:
        self.left = 0

    def wait(self) -> None:
        """Waits for the next request on standard input. Ends the process if standard input has
        ended.
        """
        order = sys.stdin.readline()
        if not order:
            sys.exit(0)
        self.steps = self.left = int(order)
        self.losses: list[Any] = []
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        self.wall_s, self.cpu_s = time.perf_counter(), time.process_time()

    def step_done(self, loss: Any) -> None:
        """Must be called after each step. `loss` is the loss, a tuple (loss, gradient norm), or an
        engine's result whose method `read` returns one of them.

        After the last step of a turn, prints the measurements as JSON and waits for the next turn.
        """
        self.losses.append(loss)
        self.left -= 1
        if self.left:
            return
        # The method `read` of an engine's result waits for the device.
        read = [each.read() if hasattr(each, "read") else each for each in self.losses]
        losses = [float(each[0] if isinstance(each, tuple) else each) for each in read]
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # the measured time includes the last weight update
        wall_s, cpu_s = time.perf_counter() - self.wall_s, time.process_time() - self.cpu_s
        answer = {"step_s": wall_s / self.steps, "step_cpu_s": cpu_s / self.steps, "losses": losses}
        if torch.cuda.is_available():
            answer["allocated_bytes"] = torch.cuda.max_memory_allocated()
            answer["reserved_bytes"] = torch.cuda.max_memory_reserved()
        print(json.dumps(answer), flush=True)
        self.wait()

    def run(self, step: Callable[[Tensor], Any], data: Tensor) -> None:
        """Calls `step` with one batch after another. Starts at the first request on standard input
        and ends the process when standard input ends.
        """
        self.wait()
        for samples in itertools.cycle(data):
            self.step_done(step(samples))


def batches(setup: Setup) -> Tensor:
    """Returns batches of random tokens, int64 [N, B, T + 1]. Step time does not depend on the
    tokens.
    """
    shape = (NUM_BATCHES, setup.batch_size, setup.spec.sequence_length + 1)
    return torch.randint(setup.spec.vocab_size, shape, generator=torch.Generator().manual_seed(0))


def initial_decoder(setup: Setup) -> Decoder:
    """Returns the kit's model with the initial weights that all contestants share. An engine of the
    kit makes equal weights on a device of the same type.
    """
    decoder = empty_decoder(setup.spec).to(setup.device)
    with torch.no_grad():
        for name, weight in decoder.named_parameters():
            shape, seed, device = weight.shape, RECIPE.seed, weight.device
            weight.copy_(initial_weight(setup.spec, name, shape, seed, device))
    return decoder


def kit(turns: Turns, setup: Setup, recipe: Recipe = RECIPE, **changes: Any) -> None:
    """Trains with an engine of the kit, as the only rank of a job. `changes` are fields of the plan
    that differ from `setup.plan`.
    """
    join_alone(setup.device)
    plan = setup.plan.replace(**changes)
    engine = build_engine(setup.spec, plan, recipe, torch.device(setup.device))
    # The kit's training loop calls `begin_step` too.
    step = engine.begin_step
    turns.run(lambda samples: step(samples, RECIPE.learning_rate), batches(setup))


def join_alone(device: str = "cpu") -> None:
    """Starts a process group in which this process is the only rank."""
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # pyright: ignore[reportPrivateImportUsage]


def plain(turns: Turns, setup: Setup) -> None:
    """Trains with a short loop like nanoGPT's over the kit's model. The loop uses torch's fast
    parts: a compiled loss and fused AdamW.
    """
    model = initial_decoder(setup)

    def forward(samples: Tensor) -> Tensor:
        logits_BTV = model(samples[:, :-1])
        return F.cross_entropy(logits_BTV.flatten(0, 1).float(), samples[:, 1:].reshape(-1))

    forward = torch.compile(forward) if setup.compile else forward

    def loss_of(samples: Tensor) -> Tensor:
        with torch.autocast(setup.device, torch.bfloat16, enabled=setup.precision == "bf16"):
            return forward(samples)

    _train(turns, setup, model, loss_of, torch.nn.utils.clip_grad_norm_)


def _train(
    turns: Turns,
    setup: Setup,
    model: torch.nn.Module,
    loss_of: Callable[[Tensor], Tensor],
    clip: Callable[[list, float], object],
) -> None:
    """Trains with a loop that minimises the mean loss and uses no engine of the kit."""
    optimizer = adamw(model.parameters(), RECIPE)

    def step(samples: Tensor) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), device=setup.device)
        for part in samples.split(setup.micro_batch_size):
            loss = loss_of(part) / setup.micro_batches
            loss.backward()
            total += loss.detach()
        clip(list(model.parameters()), 1.0)
        optimizer.step()
        return total

    turns.run(step, batches(setup).to(setup.device))


def transformers(turns: Turns, setup: Setup) -> None:
    """Trains Hugging Face's model with its Trainer. Shapes and weights equal those of the kit's
    model. Evaluation, saving and logging are off.
    """
    from transformers import Trainer, TrainerCallback, TrainingArguments

    arguments = TrainingArguments(
        output_dir="unused",
        max_steps=10**6,
        per_device_train_batch_size=setup.micro_batch_size,
        gradient_accumulation_steps=setup.micro_batches,
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
    # `shift_labels` are used without a further shift, so all T positions count, as in the other
    # loops.
    rows = [
        {"input_ids": row[:-1], "labels": row[1:], "shift_labels": row[1:]}
        for row in batches(setup).flatten(0, 1)
    ]
    model, losses = theirs(initial_decoder(setup)), []
    model.register_forward_hook(lambda module, inputs, output: losses.append(output.loss.detach()))

    class TakeTurns(TrainerCallback):
        def on_train_begin(self, *args, **kwargs) -> None:
            turns.wait()

        def on_step_end(self, *args, **kwargs) -> None:
            # The Trainer divides the summed loss of a micro-batch by all tokens of the step.
            loss = torch.stack(losses).sum()
            losses.clear()
            turns.step_done(loss)

    Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[TakeTurns()]).train()  # type: ignore


def theirs(decoder: Decoder) -> Any:
    """Returns Hugging Face's Llama or GPT-2 model with the shapes and weights of `decoder`."""
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    config = {**config_of(decoder.spec), "use_cache": False}
    if decoder.spec.family == "llama":
        model = LlamaForCausalLM(LlamaConfig(**config))
    else:
        model = GPT2LMHeadModel(GPT2Config(**config))
    missing, unexpected = model.load_state_dict(_their_weights(decoder), strict=False)
    # tied embeddings have no own output weight
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    return model


def _their_weights(decoder: Decoder) -> dict[str, Tensor]:
    """Returns the weights of `decoder` as a dict from Hugging Face's parameter name to the
    tensor.
    """
    named = ((name, weight.detach()) for name, weight in decoder.named_parameters())
    return to_hugging_face(decoder.spec, named)


def torchtitan(turns: Turns, setup: Setup) -> None:
    """Trains torchtitan's own Llama with torchtitan's `parallelize_llama` and loss, combined as in
    torchtitan's trainer. Written for torchtitan 0.3.0.
    """
    if setup.spec.family != "llama":
        sys.exit("torchtitan has no GPT-2")
    from torchtitan.components.loss import CrossEntropyLoss  # type: ignore
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig  # type: ignore
    from torchtitan.distributed import ParallelDims, parallel_dims  # type: ignore
    from torchtitan.distributed.utils import clip_grad_norm_  # type: ignore
    from torchtitan.models.llama3 import Llama3StateDictAdapter, parallelize_llama  # type: ignore

    join_alone(setup.device)
    parallel_dims.device_type = setup.device  # torchtitan would otherwise use CUDA on every machine
    parallelism = ParallelismConfig(spmd_backend="partial_dtensor")
    compiling = CompileConfig(enable=setup.compile)
    names = {"fp32": "float32", "bf16": "bfloat16"}
    config = _torchtitan_config(setup.spec)
    model = config.build()
    model.init_weights()
    weights = _their_weights(initial_decoder(setup))
    model.load_state_dict(Llama3StateDictAdapter(config, None).from_hf(weights))
    model = parallelize_llama(
        model.to(setup.device),
        parallel_dims=ParallelDims.from_config(parallelism, 1),
        training=TrainingConfig(
            mixed_precision_param=names[setup.precision], seq_len=setup.spec.sequence_length
        ),
        parallelism=parallelism,
        compile_config=compiling,
        ac_config=None,
        dump_folder="unused",
    )
    cross_entropy = CrossEntropyLoss.Config().build(compile_config=compiling)
    tokens = setup.micro_batch_size * setup.spec.sequence_length
    count = torch.tensor(float(tokens)).to(setup.device)

    def loss_of(samples: Tensor) -> Tensor:
        return cross_entropy(model(samples[:, :-1]), samples[:, 1:].contiguous(), count)[0]

    _train(turns, setup, model, loss_of, clip_grad_norm_)


def _torchtitan_config(spec: ModelSpec) -> Any:
    """Returns torchtitan's configuration of a Llama with the shapes of `spec`, built as in its
    `llama3_configs`.
    """
    from torchtitan.models import llama3  # type: ignore
    from torchtitan.models.common.attention import ScaledDotProductAttention  # type: ignore

    weights = {"weight": torch.nn.init.zeros_}  # placeholder: the kit's weights are loaded later
    rope = llama3.ComplexRoPE.Config(
        dim=spec.head_size, max_seq_len=spec.sequence_length, theta=spec.rope_theta
    )
    layers = llama3._build_llama3_layers(
        n_layers=spec.num_layers,
        dim=spec.hidden_size,
        n_heads=spec.num_heads,
        n_kv_heads=spec.num_kv_heads,
        hidden_dim=spec.ffn_hidden_size,
        rope=rope,
        attn_backend="varlen",
    )
    for layer in layers:  # no contestant masks the boundaries of documents
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    norms = [norm for layer in layers for norm in (layer.attention_norm, layer.ffn_norm)]
    norms.append(llama3.RMSNorm.Config(normalized_shape=spec.hidden_size, param_init=weights))
    for norm in norms:
        norm.eps = spec.norm_eps
    shape = {"num_embeddings": spec.vocab_size, "embedding_dim": spec.hidden_size}
    return llama3.Llama3Model.Config(
        dim=spec.hidden_size,
        vocab_size=spec.vocab_size,
        layers=layers,
        norm=norms[-1],
        enable_weight_tying=spec.tied_embeddings,
        tok_embeddings=llama3.Embedding.Config(**shape, param_init=weights),
        lm_head=llama3.Linear.Config(
            in_features=spec.hidden_size, out_features=spec.vocab_size, param_init=weights
        ),
    )


DEEPSPEED: dict[str, Any] = {"engine": "deepspeed", "compile": False}
CONTESTANTS: dict[str, Callable[[Turns, Setup], None]] = {
    "kit": kit,
    # no other contestant offers selective recomputation
    "kit_selective": partial(kit, recompute="selective"),
    "kit_muon": partial(kit, recipe=RECIPE.replace(optimizer="muon")),
    "plain": plain,
    "transformers": transformers,
    "deepspeed_zero0": partial(kit, **DEEPSPEED),
    # the Frontier recipe uses ZeRO 1 too
    "deepspeed_zero1": partial(kit, **DEEPSPEED, zero_stage=1),
    "torchtitan": torchtitan,
}


def main(name: str, threads: str, *options: str) -> None:
    """Runs one contestant until standard input ends."""
    torch.set_num_threads(int(threads))
    if "--keep-freed-memory" in options:  # the ranks of the kit use this setting too
        keep_freed_memory()
    CONTESTANTS[name](Turns(), Setup.read(SETUP))


if __name__ == "__main__":
    main(*sys.argv[1:])
