"""An H100 that is not there, for a CUDA build of torch on a machine without a GPU.

Loaded before torch, `driver.c` answers what torch's C++ code asks the driver: how many devices
there are and what they can do. `h100.py` answers the same in Python. Tensors are torch's fake
tensors, which have a device, a shape and a dtype but no numbers. So torch chooses its attention
kernel and generates Triton code for an H100, and the kit's engine takes whole steps. Nothing is
computed, so that numbers, NCCL and time stay untested.
"""
