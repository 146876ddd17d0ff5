"""Sizes as symbols and expressions."""
