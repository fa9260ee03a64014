"""Python imports this at its start where the folder is on PYTHONPATH: every process has it."""

import os
import sys

from tests.engines.real_nxd.closed import ClosedPackages

os.environ.setdefault("PJRT_DEVICE", "CPU")
os.environ.setdefault("HOST_WORLD_SIZE", "1")
# Graphs here are small and run a few times: optimising them takes longer than running them.
os.environ.setdefault(
    "XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
)
sys.meta_path.insert(0, ClosedPackages())
