"""Torch calls on lists: the same call over each element, in as few calls as possible."""
