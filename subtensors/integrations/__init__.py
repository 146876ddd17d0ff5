"""One call for users of other packages, which are imported only when it is made."""

from subtensors.integrations import lightning, torchtitan, transformers

__all__ = ["lightning", "torchtitan", "transformers"]
