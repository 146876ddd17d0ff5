"""Recurrent networks: valid steps precede the padding, so only the final states need care.

The final hidden state is the output at the true end. The final cell state of an LSTM is not among its outputs, so the
state is kept constant in the padding: the input gets one more feature, which is 1 in padding and whose weights hold the
forget gate open and the input gate shut,

    c_t = sigmoid(f + 1e4) c_(t-1) + sigmoid(i - 1e4) g = c_(t-1),

which is exact, and so is its gradient. A backward direction runs forward over the valid steps in reversed order.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from subtensors.dispatch.ops.errors import UnsupportedCall
from subtensors.dispatch.ops.tree import PyTree, tree_find, tree_map_only
from subtensors.dispatch.padded.interpreter import PaddedCall, apply, table
from subtensors.dispatch.padded.padded_value import PaddedValue, opaque, result
from subtensors.dispatch.padded.pointwise import broadcast_dim
from subtensors.dispatch.sizes.dim_factors import static_dims

aten = torch.ops.aten

SATURATED = 1e4
"""A number that a sigmoid maps to 1 in every dtype, and its negative to 0; float16 can hold it."""


@table.register(aten.lstm.input, aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input)
def recurrent(
    call: PaddedCall,
    x: PaddedValue,
    hx: PaddedValue | list[PaddedValue],
    params: Sequence[PaddedValue],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[PaddedValue, ...]:
    """Return the outputs of the last layer, and the final states of all layers."""
    time, is_lstm = 1 if batch_first else 0, isinstance(hx, list)
    x, states = _with_shared_batch(call, x, tree_find(PaddedValue, hx), 1 - time)
    initial = [s.filled(0) for s in states]
    if not x.is_padded(time):
        out, *ends = call.dense({"input": x.filled(0), "hx": initial if is_lstm else initial[0]})
        last = [
            result(e, [s.dims[0], x.dims[1 - time], *static_dims([s.shape[2]])], x.sizes)
            for e, s in zip(ends, states, strict=True)
        ]
        outputs = result(out, [*x.dims[:2], *static_dims([out.shape[2]])], x.sizes)
        return tuple(o.gradient_masked() for o in (outputs, *last))
    # Through torch's own function, not the op, warnings are raised inside of the block that ignores them.
    function = getattr(torch, call.op.overloadpacket.__name__)
    options = has_biases, 1, 0.0, train, False, batch_first
    directions = 2 if bidirectional else 1
    each = len(params) // (num_layers * directions)
    finals: list[list[PaddedValue]] = [[] for _ in states]
    for layer in range(num_layers):
        sides = []
        for k in range(layer * directions, (layer + 1) * directions):
            weights = [w.dense for w in params[k * each : (k + 1) * each]]
            steps = apply(aten.flip.default, x, [time]) if k % directions else x
            out, *ends = _layer(function, steps, [s[k : k + 1] for s in initial], weights, options, time)
            sides.append(apply(aten.flip.default, out, [time]) if k % directions else out)
            for layer_ends, end in zip(finals, ends, strict=True):
                layer_ends.append(end)
        x = apply(aten.cat.default, sides, 2) if directions > 1 else sides[0]
        if dropout and train and layer < num_layers - 1:
            x = apply(aten.dropout.default, x, dropout, True)
    return x, *(apply(aten.stack.default, end, 0) for end in finals)


def _layer(
    function: Callable[..., tuple[Tensor, ...]],
    steps: PaddedValue,
    states: list[Tensor],
    weights: list[Tensor],
    options: tuple[object, ...],
    time: int,
) -> list[PaddedValue]:
    """Return the outputs of one layer in one direction, and its final states."""
    dense, is_lstm = steps.filled(0), len(states) == 2
    if is_lstm:
        mask = steps.mask([time])
        assert mask is not None
        is_padding = mask.logical_not().expand(*steps.shape[:2], 1).to(dense.dtype)
        dense = torch.cat([dense, is_padding], 2)
        gate = weights[1].new_full((weights[1].shape[0] // 4, 1), SATURATED)
        zeros = torch.zeros_like(gate)
        weights = [torch.cat([weights[0], torch.cat([-gate, gate, zeros, zeros])], 1), *weights[1:]]

    def without_warning(*args: PyTree) -> tuple[Tensor, ...]:
        with warnings.catch_warnings():  # cuDNN's, that it copies weights which lie apart in memory
            warnings.filterwarnings("ignore", "RNN module weights are not part of single contiguous chunk")
            return function(*args)

    out, *last = opaque(without_warning, dense, states if is_lstm else states[0], weights, *options)
    outputs = result(out, [*steps.dims[:2], *static_dims([out.shape[2]])], steps.sizes).gradient_masked()
    ends = [apply(aten.select.int, outputs, time, -1)]
    if is_lstm:
        cell = last[1].reshape(steps.shape[1 - time], -1)
        dims = [steps.dims[1 - time], *static_dims([cell.shape[1]])]
        ends.append(result(cell, dims, steps.sizes).gradient_masked())
    return [outputs, *ends]


@table.register(aten.lstm_cell, aten.gru_cell, aten.rnn_tanh_cell, aten.rnn_relu_cell)
def cell(call: PaddedCall, x: PaddedValue, hx: PaddedValue | list[PaddedValue]) -> PyTree:
    """Run one step."""
    x, states = _with_shared_batch(call, x, tree_find(PaddedValue, hx), 0)
    initial = [s.filled(0) for s in states]
    out = call.dense({"input": x.filled(0), "hx": initial if isinstance(hx, list) else initial[0]})

    def state(t: Tensor) -> PaddedValue:
        return result(t, [x.dims[0], *static_dims([t.shape[1]])], x.sizes).gradient_masked()

    return tree_map_only(Tensor, state, out)


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
