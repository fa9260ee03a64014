"""Tests of the Neuron engine with the real source of NeuronX Distributed (NxD) and the real
Torch-XLA, on a machine without a Trainium device.

`make test-nxd NXD=path/to/neuronx-distributed` needs a checkout of
github.com/aws-neuron/neuronx-distributed. The command makes a separate environment from
`requirements.txt` in this folder, and runs the tests of this folder.

Tensors are Torch-XLA's lazy tensors on its CPU device. NxD's layers, ZeRO 1, pipeline,
recomputation and checkpoints are unchanged, and run the code that runs on a device. Three parts are
replaced: the closed packages of the Neuron SDK are empty (`closed.py`), XLA's collectives use gloo
(`collectives.py`), and ranks are identified by RANK and WORLD_SIZE.

Not tested: neuronx-cc, NeuronCores, stochastic rounding, the changes of torch_neuronx to Torch-XLA,
and speed.
"""
