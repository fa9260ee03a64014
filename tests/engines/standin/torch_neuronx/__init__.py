"""A replacement of torch_neuronx, which is imported but never called. See `neuronx_distributed` in
the folder above.
"""
