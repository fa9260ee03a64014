"""The Neuron engine on the real source of NeuronX Distributed (NxD) and the real Torch-XLA, without
a Trainium device.

    make test-nxd NXD=path/to/neuronx-distributed      a checkout of
                                                       github.com/aws-neuron/neuronx-distributed

builds an environment of its own (`requirements.txt` here) and runs what is in this folder. Tensors
are Torch-XLA's lazy ones on its CPU device, and NxD's layers, ZeRO 1, pipeline, recomputation and
checkpoints run as they are, down the paths that they take on a device. Three things are ours: the
closed parts of the Neuron SDK are empty (`closed.py`), XLA's collectives travel over gloo
(`collectives.py`), and ranks are told apart by RANK and WORLD_SIZE.

Not shown: neuronx-cc, NeuronCores, stochastic rounding, what torch_neuronx changes in Torch-XLA,
and speed.
"""
