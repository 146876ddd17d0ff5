"""Recurrent networks: valid steps precede the padding, so only the final states need care.

The final hidden state is the output at the true end. The final cell state of an LSTM is not among its outputs, so the
state is kept constant in the padding: the input gets one more feature, which is 1 in padding and whose weights hold the
forget gate open and the input gate shut,

    c_t = sigmoid(f + 1e4) c_(t-1) + sigmoid(i - 1e4) g = c_(t-1),

which is exact, and so is its gradient. A backward direction runs forward over the valid steps in reversed order.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from subtensors.dispatch.ops.tree import PyTree, tree_find
from subtensors.dispatch.padded.errors import UnsupportedCall
from subtensors.dispatch.padded.interpreter import PaddedCall, apply, table
from subtensors.dispatch.padded.padded_value import PaddedValue, result
from subtensors.dispatch.padded.pointwise import broadcast_dim
from subtensors.dispatch.sizes.dim_factors import static_dims

aten = torch.ops.aten

SATURATED = 1e4
"""A number that a sigmoid maps to 1 in every dtype, and its negative to 0; float16 can hold it."""


@table.register(aten.lstm.input, aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input)
def recurrent(call: PaddedCall) -> tuple[PaddedValue, ...]:
    """Return the outputs of the last layer, and the final states of all layers."""
    time = 1 if call["batch_first"] else 0
    x, states = _with_shared_batch(call, call["input"], tree_find(PaddedValue, call["hx"]), 1 - time)
    hidden = [static_dims([s.shape[2]])[0] for s in states]
    if not x.is_padded(time):
        initial = [s.filled(0) for s in states]
        out, *ends = call.dense({"input": x.filled(0), "hx": initial if isinstance(call["hx"], list) else initial[0]})
        dims = [*x.dims[:2], *static_dims([out.shape[2]])]
        last = [
            result(e, [s.dims[0], x.dims[1 - time], h], x.sizes) for e, s, h in zip(ends, states, hidden, strict=True)
        ]
        return tuple(o.gradient_masked() for o in (result(out, dims, x.sizes), *last))
    directions = 2 if call["bidirectional"] else 1
    each = len(call["params"]) // (call["num_layers"] * directions)
    ends = [[] for _ in states]
    for layer in range(call["num_layers"]):
        sides = []
        for k in range(layer * directions, (layer + 1) * directions):
            begin = [s.filled(0)[k : k + 1] for s in states]
            weights = [w.dense for w in call["params"][k * each : (k + 1) * each]]
            out, *last = _layer(call, x, begin, weights, time, backwards=k % directions == 1)
            sides.append(out)
            for layer_ends, end in zip(ends, last, strict=True):
                layer_ends.append(end)
        x = apply(aten.cat.default, sides, 2) if directions > 1 else sides[0]
        if call["dropout"] and call["train"] and layer < call["num_layers"] - 1:
            x = apply(aten.dropout.default, x, call["dropout"], True)
    return x, *(apply(aten.stack.default, end, 0) for end in ends)


def _layer(
    call: PaddedCall, x: PaddedValue, states: list[Tensor], weights: list[Tensor], time: int, backwards: bool
) -> list[PaddedValue]:
    """Return the outputs of one layer in one direction, and its final states."""
    steps = apply(aten.flip.default, x, [time]) if backwards else x
    dense = steps.filled(0)
    is_lstm = len(states) == 2
    if is_lstm:
        mask = steps.mask([time])
        assert mask is not None
        is_padding = mask.logical_not().expand(*x.shape[:2], 1).to(dense.dtype)
        dense = torch.cat([dense, is_padding], 2)
        gate = weights[1].new_full((weights[1].shape[0] // 4, 1), SATURATED)
        zeros = torch.zeros_like(gate)
        weights = [torch.cat([weights[0], torch.cat([-gate, gate, zeros, zeros])], 1), *weights[1:]]
    begin: list[Tensor] | Tensor = states if is_lstm else states[0]
    options = call["has_biases"], 1, 0.0, call["train"], False, call["batch_first"]
    with warnings.catch_warnings():
        # cuDNN warns that it copies weights which are not in one piece of memory with the others.
        warnings.filterwarnings("ignore", "RNN module weights are not part of single contiguous chunk")
        # Through torch's own function, not the op, warnings are raised inside of this block.
        out, *last = getattr(torch, call.op.overloadpacket.__name__)(dense, begin, weights, *options)
    outputs = result(out, [*x.dims[:2], *static_dims([out.shape[2]])], x.sizes).gradient_masked()
    ends = [apply(aten.select.int, outputs, time, -1)]
    if is_lstm:
        cell = last[1].reshape(x.shape[1 - time], -1)
        ends.append(result(cell, [x.dims[1 - time], *static_dims([cell.shape[1]])], x.sizes).gradient_masked())
    return [apply(aten.flip.default, outputs, [time]) if backwards else outputs, *ends]


@table.register(aten.lstm_cell, aten.gru_cell, aten.rnn_tanh_cell, aten.rnn_relu_cell)
def cell(call: PaddedCall) -> PyTree:
    """Run one step."""
    x, states = _with_shared_batch(call, call["input"], tree_find(PaddedValue, call["hx"]), 0)
    initial = [s.filled(0) for s in states]
    out = call.dense({"input": x.filled(0), "hx": initial if len(states) > 1 else initial[0]})
    outs = out if isinstance(out, tuple) else (out,)
    results = [result(o, [x.dims[0], *static_dims([o.shape[1]])], x.sizes).gradient_masked() for o in outs]
    return tuple(results) if isinstance(out, tuple) else results[0]


def _with_shared_batch(
    call: PaddedCall, x: PaddedValue, states: Sequence[PaddedValue], at: int
) -> tuple[PaddedValue, list[PaddedValue]]:
    """Return the input and the states with the same padding in their batch, dim `at` of the input."""
    weights = [w for w in call.values if w is not x and all(w is not s for s in states)]
    features = [x.is_padded(x.dim() - 1), *(s.is_padded(d) for s in states for d in range(s.dim()) if d != s.dim() - 2)]
    if any(features) or any(w.padded_dims for w in weights):
        raise UnsupportedCall("its features, its layers or its weights are padded")
    sizes = call.sizes()
    batch = broadcast_dim([x.dims[at], *(s.dims[-2] for s in states)], sizes)
    batched = PaddedValue(x.dense, (*x.dims[:at], batch, *x.dims[at + 1 :]), sizes)
    return batched, [PaddedValue(s.dense, (*s.dims[:-2], batch, s.dims[-1]), sizes) for s in states]
