"""Checkpoints of other software, to and from the kit's decoder: Hugging Face, NxD, Megatron-DeepSpeed, GGUF."""
