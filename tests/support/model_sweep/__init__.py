"""A sweep over the models of transformers: tiny random ones, plain against bucketed, uniform and ragged.

`cases.py` is the table, a module a family; `outcome.py` runs a row of it, and `page.py` writes docs/models.md.
"""
