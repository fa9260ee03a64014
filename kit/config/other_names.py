"""Names that other tools have for the settings of a training, for advice on unknown names.

Users know the names of torchrun, transformers, Megatron-LM, torchtitan and nanoGPT. An error about
an unknown name says which field of the spec, plan or recipe has this meaning.
"""

import difflib
from collections.abc import Iterable
from functools import cache

from cluster.record import Record, path_name

NAMES = {
    "spec.sequence_length": "seq seq_len seq_length seqlen length max_length max_seq_len"
    " max_seq_length context_length block_size max_position_embeddings",
    "spec.num_layers": "layers n_layer n_layers depth num_hidden_layers",
    "spec.hidden_size": "n_embd d_model dim hidden hidden_dim width",
    "spec.num_heads": "heads n_head n_heads num_attention_heads",
    "spec.num_kv_heads": "kv_heads n_kv_heads num_key_value_heads num_query_groups",
    "spec.ffn_hidden_size": "d_ff intermediate_size ffn_dim ffn_size",
    "spec.vocab_size": "vocab n_vocab padded_vocab_size",
    "spec.norm_eps": "rms_norm_eps layer_norm_eps layernorm_epsilon",
    "spec.init_std": "initializer_range init_method_std",
    "spec.tied_embeddings": "tie_word_embeddings tie_embeddings",
    "spec.rope_theta": "rope_base rotary_base",
    "plan.tensor_parallel": "tp tp_size tensor_parallel_size tensor_parallel_degree"
    " tensor_model_parallel_size",
    "plan.pipeline_parallel": "pp pp_size pipeline_parallel_size pipeline_parallel_degree"
    " pipeline_model_parallel_size",
    "plan.data_parallel": "dp dp_size data_parallel_size replicas",
    "plan.data_parallel=REPLICAS": "gpus num_gpus n_gpus gpus_per_node nproc nproc_per_node"
    " num_processes world_size",
    "plan.context_parallel": "cp cp_size context_parallel_size",
    "plan.virtual_stages=N": "vpp virtual_pipeline_model_parallel_size"
    " num_layers_per_virtual_pipeline_stage",
    "plan.shard_size": "hsdp data_parallel_shard_degree",
    "plan.zero_stage": "zero",
    "plan.zero_stage=3": "fsdp",
    "plan.micro_batch_size": "mbs microbatch_size per_device_batch_size"
    " per_device_train_batch_size train_micro_batch_size_per_gpu local_batch_size",
    "plan.global_batch_size": "batch batch_size gbs train_batch_size",
    "plan.global_batch_size=SEQUENCES": "grad_accum gradient_accumulation_steps"
    " gradient_accumulation accumulate_grad_batches",
    "plan.precision=bf16": "bf16 dtype mixed_precision",
    "plan.precision=fp16": "fp16",
    "plan.recompute": "activation_checkpointing activation_checkpoint recompute_granularity",
    "plan.recompute=full": "gradient_checkpointing",
    "plan.compile=true": "torch_compile",
    "recipe.learning_rate": "lr max_lr peak_lr",
    "recipe.min_learning_rate": "min_lr lr_min",
    "recipe.warmup_steps": "warmup warmup_iters lr_warmup_iters lr_warmup_steps num_warmup_steps",
    "recipe.warmup_steps=STEPS": "warmup_ratio warmup_fraction",
    "recipe.decay_steps": "lr_decay_iters lr_decay_steps",
    "recipe.schedule": "lr_schedule lr_scheduler lr_scheduler_type lr_decay_style scheduler",
    "recipe.num_steps": "steps max_steps train_steps train_iters iters iterations max_iters"
    " num_train_steps total_steps",
    "recipe.num_steps=STEPS": "epochs num_epochs num_train_epochs",
    "recipe.weight_decay": "wd decay",
    "recipe.beta1": "adam_beta1",
    "recipe.beta2": "adam_beta2",
    "recipe.eps": "adam_eps adam_epsilon epsilon",
    "recipe.gradient_clip": "clip grad_clip clip_grad max_grad_norm max_norm gradient_clip_val"
    " gradient_clipping",
    "recipe.optimizer": "optim",
    "recipe.checkpoint_every": "save_steps save_every save_interval checkpoint_interval",
    "recipe.keep_last": "save_total_limit",
    "recipe.validation_every": "eval_steps eval_every eval_interval val_every val_interval",
    "recipe.data": "data_path train_data dataset dataset_path",
    "recipe.init_from": "load init_checkpoint pretrained",
}
"""Names that other tools have for a setting, separated by spaces, by the setting. If a setting ends
with a value, the value of the other tool has another meaning or format."""


OWNERS = {"spec": "ModelSpec", "plan": "Plan", "recipe": "Recipe"}
"""Name of the record class by the first part of a setting."""


def find_setting(name: str, fields: Iterable[str] = ()) -> str:
    """Returns the setting of the kit that an unknown name means, such as `recipe.learning_rate` for
    `lr` and for `learning_rate`. The setting may end with a value, as in `plan.precision=bf16`.
    Returns "" if no setting has such a name, or a nearly equal one.

    `fields` are further settings, such as `recipe.z_loss`, that are found by their own names.
    """
    settings = {field.partition(".")[2]: field for field in fields} | _settings()
    key = name.lower().strip("-").replace("-", "_")
    if key in settings:
        return settings[key]
    # A short name that is nearly equal may have another meaning, such as `dp` and `tp`.
    names = [known for known in settings if len(known) > 4]
    close = difflib.get_close_matches(key, names, n=1, cutoff=0.8)
    return settings[close[0]] if close else ""


def field_advice(record: type[Record], name: str) -> str:
    """Returns advice on a name that is not a field of a spec, plan or recipe, if another tool has
    such a name for a setting, or if the name is a field of another record. Otherwise returns an
    empty text.
    """
    setting = _settings().get(name.lower(), "").partition("=")[0]
    place, _, field = setting.partition(".")
    if not field:
        return ""
    if place == path_name(record):
        return f"{record.__name__}'s field is {field}."
    return f"{OWNERS[place]} has this setting: {setting}."


@cache
def _settings() -> dict[str, str]:
    """Returns the settings in NAMES, by each name of a setting: its own name and those of other
    tools.
    """
    found = {}
    for setting, names in NAMES.items():
        plain = setting.partition("=")[0]
        found[plain.partition(".")[2]] = plain
        found |= dict.fromkeys(names.split(), setting)
    return found
