"""Checks of the class table: each claim of it is put to a probe on calls that really happened."""
