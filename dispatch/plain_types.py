"""The types of tensors that kernels and foreach overloads may read and write through their addresses."""

from __future__ import annotations

import torch

PLAIN_TYPES: set[type[torch.Tensor]] = {torch.Tensor, torch.nn.Parameter}
"""Exactly these types, not their subclasses: a subclass may mean something else by its memory."""
