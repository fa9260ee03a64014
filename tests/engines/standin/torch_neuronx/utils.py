"""Which platform the stand-in says it is on."""


def get_platform_target() -> str:
    return "trn1"
