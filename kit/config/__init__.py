"""Configuration of a run: its model (`ModelSpec`), its layout on devices (`Plan`), its training
(`Recipe`), and the rules that these records must obey.
"""
