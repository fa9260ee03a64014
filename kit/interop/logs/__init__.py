"""Imports runs of other trainers: converts a log to a run directory of the kit."""
