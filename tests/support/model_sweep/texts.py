"""Rows of the sweep for models of text: what they are given, and how their losses count."""

from __future__ import annotations

from torch import Tensor

from model_sweep.case import ANSWER, SEQ, ModelCase, tiny, tokens


def causal(model: str, family: str, name: str | None = None, shift: int = 1, **options: object) -> ModelCase:
    """A language model that predicts the next token; its loss shifts the labels by so many."""

    def inputs(n: int, rows: int) -> dict[str, Tensor]:
        ids = tokens(n, rows)
        return {"input_ids": ids, "labels": ids.clone()}

    dims = {"input_ids": {1: SEQ}, "labels": {1: SEQ}}
    return ModelCase(name or model, family, tiny(model, **options), inputs, dims, counted=lambda n: n - shift)


def masked(model: str, family: str = "encoder", name: str | None = None, **options: object) -> ModelCase:
    """A language model that predicts each token."""

    def inputs(n: int, rows: int) -> dict[str, Tensor]:
        return {"input_ids": tokens(n, rows), "labels": tokens(n, rows)}

    dims = {"input_ids": {1: SEQ}, "labels": {1: SEQ}}
    return ModelCase(name or model, family, tiny(model, **options), inputs, dims, counted=lambda n: n)


def encoder(
    model: str, calls: tuple[tuple[int, ...], ...], ragged: tuple[tuple[int, ...], ...], **options: object
) -> ModelCase:
    """A model of tokens without a loss."""

    def inputs(n: int, rows: int) -> dict[str, Tensor]:
        return {"input_ids": tokens(n, rows)}

    return ModelCase(model, "encoder", tiny(model, **options), inputs, {"input_ids": {1: SEQ}}, calls, ragged)


def translating(model: str, family: str = "encoder-decoder", name: str | None = None, **options: object) -> ModelCase:
    """An encoder and a decoder, each with a length of its own."""

    def inputs(n: int, m: int, rows: int) -> dict[str, Tensor]:
        return {"input_ids": tokens(n, rows), "labels": tokens(m, rows)}

    dims = {"input_ids": {1: SEQ}, "labels": {1: ANSWER}}
    calls = ((7, 3), (5, 6), (8, 8), (12, 5), (9, 7), (1, 4), (3, 1), (10, 12))
    return ModelCase(
        name or model,
        family,
        tiny(model, **options),
        inputs,
        dims,
        calls,
        ((5, 4), (9, 6), (2, 3)),
        lambda n, m: m,
    )
