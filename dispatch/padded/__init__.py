"""What a PaddedTensor does when it meets an op: one rule a class of ops, in tables."""
