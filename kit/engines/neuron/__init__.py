"""The engine `neuron`, which trains with NeuronX Distributed (NxD) on AWS Trainium."""
