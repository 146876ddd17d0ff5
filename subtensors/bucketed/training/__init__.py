"""Calls that are tracked by autograd, and whole training steps."""
