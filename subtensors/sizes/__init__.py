"""Sizes that vary: named dimensions, their buckets, and the sizes that a program accepts."""
