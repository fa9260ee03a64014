"""Sets up the simulated Neuron environment in every process. Python imports this module at its
start if this folder is on PYTHONPATH.
"""

import os
import sys

from tests.engines.real_nxd.closed import ClosedPackages

os.environ.setdefault("PJRT_DEVICE", "CPU")
os.environ.setdefault("HOST_WORLD_SIZE", "1")
# Graphs in these tests are small and run only a few times. Their optimisation would take longer
# than the runs.
os.environ.setdefault(
    "XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
)
sys.meta_path.insert(0, ClosedPackages())
