"""A simulated H100 for a CUDA build of torch on a machine without a GPU.

`driver.c`, which is loaded before torch, answers the queries of torch's C++ code to the driver: the
number of devices and their capabilities. `h100.py` answers the queries of Python code. Tensors are
torch's fake tensors, which have a device, a shape and a dtype, but no numbers. Torch therefore
chooses its attention kernel and generates Triton code for an H100, and the kit's engine runs
complete steps. Nothing is computed, so numerical results, NCCL and speed are not tested.
"""
