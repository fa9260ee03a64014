"""Runs of other trainers, read from their logs."""
