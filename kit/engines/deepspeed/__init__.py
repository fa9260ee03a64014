"""The engine on DeepSpeed."""
