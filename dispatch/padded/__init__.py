"""The rules of PaddedTensor for ops: one rule per class of ops, in tables."""
