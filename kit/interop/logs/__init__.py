"""Imports runs of other trainers from their logs."""
