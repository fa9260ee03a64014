"""Figures in the kit's style, tables for notebooks and terminals, and safe printing of text in a
terminal.
"""
