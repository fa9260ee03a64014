"""The engine that uses DeepSpeed."""
