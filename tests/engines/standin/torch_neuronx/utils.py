"""Platform name that the simulated torch_neuronx reports."""


def get_platform_target() -> str:
    return "trn1"
