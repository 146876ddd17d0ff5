"""One call for users of other packages, which are imported only when it is made."""

from subtensors.integrations import lightning, transformers

__all__ = ["lightning", "transformers"]


def __dir__() -> list[str]:
    return [*__all__, *(name for name in globals() if name.startswith("__"))]
