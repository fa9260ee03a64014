"""The platform that the stand-in reports."""


def get_platform_target() -> str:
    return "trn1"
