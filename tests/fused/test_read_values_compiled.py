"""Numbers that fused math reads besides its arguments, in compiled code."""

import pytest
import torch

import subtensors as st

rate = 2.0


class Scale:
    def __init__(self):
        self.own = 2.0

    @st.fused
    def apply(self, p):
        p.mul_(self.own)


@pytest.mark.parametrize("packed", [False, True])
def test_compiled_code_reads_a_number_at_each_call(monkeypatch, packed):
    scale, times_rate = Scale(), st.fused(lambda p: p.mul_(rate))

    @torch.compile(fullgraph=True, backend="eager" if not packed else "aot_eager")
    def step(p):
        times_rate(p)
        scale.apply(p)

    p = st.TensorList([torch.ones(2), torch.ones(3)])
    p = p.pack() if packed else p
    with torch.no_grad():
        step(p)
        assert p[1].tolist() == [4] * 3
        monkeypatch.setitem(globals(), "rate", 5.0)
        scale.own = 0.5
        step(p)
    assert p[1].tolist() == [10] * 3
