"""The training loop of one rank, with checkpoints, watchdog, heartbeat and reactions to bad
steps.
"""
