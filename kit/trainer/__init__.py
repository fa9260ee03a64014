"""The training loop of one rank, with its checkpoints, watchdog, heartbeat and reactions to bad
steps.
"""
