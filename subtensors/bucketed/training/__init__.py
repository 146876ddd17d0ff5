"""Calls that autograd follows, and whole training steps."""
