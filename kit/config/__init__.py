"""Configuration of a run: its model (`ModelSpec`), layout (`Plan`) and training (`Recipe`), and the
rules that they must obey.
"""
