"""The engine `deepspeed`, which trains with the library DeepSpeed."""
