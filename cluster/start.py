"""Runs a module of the source tree that contains this file.

    python -P SOURCE/cluster/start.py MODULE WORDS...

does what `python -m MODULE WORDS...` does, with two differences. The working directory is not on
`sys.path`, so that a user's `token.py` or `torch.py` in it is not imported. `kit` and `cluster` are
imported from SOURCE, whether or not they are installed. No other package in SOURCE is preferred to
an installed package.

This file imports only modules that are part of the interpreter itself.
"""

import os
import runpy
import sys
from importlib.machinery import ModuleSpec, PathFinder

SOURCE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PACKAGES = ("kit", "cluster")


class FinderInSource:
    """Finds the packages `kit` and `cluster` in SOURCE."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Returns the location of a package in SOURCE. Returns None for any other module."""
        return PathFinder.find_spec(name, [SOURCE]) if name in PACKAGES else None


if __name__ == "__main__":
    if not sys.flags.safe_path:
        del sys.path[0]  # Python put the folder of this file first.
    sys.meta_path.insert(0, FinderInSource)
    # A process that multiprocessing spawns receives sys.path, but not sys.meta_path.
    sys.path.append(SOURCE)
    del sys.argv[0]
    try:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    except ImportError as error:
        from cluster.shadows import explain

        explain(error)
        raise
