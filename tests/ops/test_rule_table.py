"""Rule tables: how a rule is registered, found, explained and refused."""

from __future__ import annotations

import pytest
import torch

from subtensors.dispatch.chunked.rules import RULES as chunked_table
from subtensors.dispatch.ops import view_dims
from subtensors.dispatch.ops.bound_call import BoundCall, by_name
from subtensors.dispatch.ops.dims import DimMap
from subtensors.dispatch.ops.errors import RuleError
from subtensors.dispatch.ops.op_classes import OpClass, functional_form
from subtensors.dispatch.ops.rule_table import ADVICE, Key, RuleTable
from subtensors.dispatch.padded.rules import table as padded_table

aten = torch.ops.aten


def for_overload() -> str:
    return "overload"


def for_op() -> str:
    return "op"


def for_class() -> str:
    return "class"


def test_the_nearest_key_wins_overload_then_op_then_class() -> None:
    table = RuleTable("Demo")
    table.register(OpClass.POINTWISE)(for_class)
    assert table.lookup(aten.add.Tensor) is for_class
    table.register(aten.add)(for_op)
    assert table.lookup(aten.add.Tensor) is for_op
    table.register(aten.add.Tensor)(for_overload)
    assert table.lookup(aten.add.Tensor) is for_overload
    assert table.lookup(aten.add.Scalar) is for_op
    assert table.lookup(aten.sub.Tensor) is for_class


def test_one_function_can_be_registered_for_several_keys_and_comes_back_unchanged() -> None:
    table = RuleTable("Demo")
    assert table.register(OpClass.SCAN, aten.mm, aten.sort.default)(for_op) is for_op
    for op in (aten.cumsum.default, aten.mm.out, aten.sort.default):
        assert table.lookup(op) is for_op


def test_in_place_and_foreach_overloads_get_the_rule_of_their_class() -> None:
    table = RuleTable("Demo")
    table.register(OpClass.POINTWISE)(for_class)
    for op in (aten.add_.Tensor, aten.add.out, aten._foreach_add_.List, aten._foreach_add.ScalarList_out):
        assert table.lookup(op) is for_class


@pytest.mark.parametrize("key", [aten.add.Tensor, aten.add, OpClass.POINTWISE])
def test_registering_a_key_twice_is_refused_naming_both_functions(key: Key) -> None:
    table = RuleTable("Demo")
    table.register(key)(for_op)
    with pytest.raises(ValueError, match=r"Demo: .* has the rule for_op already, so for_class can't be registered"):
        table.register(key)(for_class)


def test_a_refused_registration_registers_none_of_its_keys() -> None:
    table = RuleTable("Demo")
    table.register(OpClass.SCAN)(for_class)
    with pytest.raises(ValueError, match="every scan op"):
        table.register(aten.mm, OpClass.SCAN)(for_op)
    with pytest.raises(RuleError):
        table.lookup(aten.mm.default)


def test_a_key_given_twice_in_one_registration_is_refused() -> None:
    with pytest.raises(ValueError, match=r"every overload of aten\.mm has the rule for_op already, so for_op"):
        RuleTable("Demo").register(aten.mm, aten.mm)(for_op)


@pytest.mark.parametrize("key", ["add", torch.add, None])
def test_a_key_of_another_kind_is_refused_where_it_is_given(key: object) -> None:
    with pytest.raises(TypeError, match="a rule's key is an OpOverload, an OpOverloadPacket or an OpClass, not"):
        RuleTable("Demo").register(key)  # type: ignore[arg-type]


def test_a_registration_without_a_key_is_refused() -> None:
    with pytest.raises(TypeError, match="at least one key"):
        RuleTable("Demo").register()


def test_a_miss_names_the_op_its_class_the_type_and_what_to_do() -> None:
    with pytest.raises(RuleError) as refused:
        RuleTable("PaddedTensor").lookup(aten.cumsum_.default)
    assert str(refused.value) == (
        "PaddedTensor has no rule for aten.cumsum_.default (class scan): scan the plain tensor values"
    )
    assert isinstance(refused.value, NotImplementedError)


def test_a_type_can_give_better_advice_for_some_classes() -> None:
    table = RuleTable("Demo", advice={OpClass.VIEW: "call .unpad() first"})
    with pytest.raises(RuleError, match=r"class view\): call \.unpad\(\) first"):
        table.lookup(aten.view.default)
    with pytest.raises(RuleError, match=ADVICE[OpClass.SCAN]):
        table.lookup(aten.cumsum.default)


def test_every_class_has_advice() -> None:
    assert set(ADVICE) == set(OpClass)


def test_tables_of_two_types_do_not_share_rules() -> None:
    RuleTable("One").register(OpClass.SCAN)(for_class)
    with pytest.raises(RuleError, match="Two has no rule"):
        RuleTable("Two").lookup(aten.cumsum.default)


def test_explain_says_which_key_matched_or_why_none_did() -> None:
    table = RuleTable("Demo")
    assert table.explain(aten.add.Tensor).startswith("Demo has no rule for aten.add.Tensor (class pointwise)")
    table.register(OpClass.POINTWISE)(for_class)
    assert table.explain(aten.add.Tensor) == "aten.add.Tensor on a Demo: for_class, registered for every pointwise op"
    table.register(aten.add)(for_op)
    assert table.explain(aten.add.Tensor).endswith("for_op, registered for every overload of aten.add")
    table.register(aten.add.Tensor)(for_overload)
    assert table.explain(aten.add.Tensor).endswith("for_overload, registered for aten.add.Tensor")


def test_an_op_outside_aten_is_looked_up_too() -> None:
    table = RuleTable("Demo")
    table.register(OpClass.OTHER)(for_class)
    assert table.lookup(torch.ops.prims.device_put.default) is for_class


def test_a_rule_may_be_any_callable() -> None:
    class Loud:
        def __call__(self) -> str:
            return "loud"

    table = RuleTable("Demo")
    table.register(aten.mm)(Loud())
    assert table.lookup(aten.mm.default)() == "loud"
    assert "Loud, registered for every overload of aten.mm" in table.explain(aten.mm.default)


def test_an_op_with_a_dimension_map_gets_the_interpreter_unless_a_nearer_key_has_a_rule() -> None:
    table = RuleTable("Demo")
    table.register(DimMap)(for_op)
    assert table.lookup(aten.transpose.int) is for_op
    assert table.explain(aten.transpose.int).endswith("for_op, registered for every op with a dimension map")
    table.register(OpClass.VIEW)(for_class)
    assert table.lookup(aten.transpose.int) is for_class
    with pytest.raises(RuleError):
        table.lookup(aten.nonzero.default)


def test_a_rule_across_the_types_dims_is_kept_apart_from_the_others() -> None:
    table = RuleTable("Demo")
    table.register(DimMap)(for_op)
    table.register(OpClass.REDUCTION, across=True)(for_class)
    assert table.lookup(aten.sum.default) is for_op
    assert table.lookup_across(aten.sum.default) is for_class
    assert table.lookup_across(aten.flip.default) is None
    assert table.explain(aten.sum.default, across=True).endswith(
        "for_class, registered for every reduction op across its own dims"
    )


def test_a_rule_for_a_dimension_map_serves_every_op_that_has_it_before_one_for_their_class() -> None:
    table = RuleTable("Demo")
    table.register(OpClass.COPY, across=True)(for_class)
    table.register(view_dims.triangle, across=True)(for_op)
    assert {table.lookup_across(op) for op in (aten.tril.default, aten.triu.default)} == {for_op}
    assert table.lookup_across(aten.flip.default) is for_class
    assert table.explain(aten.triu.default, across=True).endswith(
        "for_op, registered for every op with the dimension map triangle across its own dims"
    )
    with pytest.raises(ValueError, match="every op with the dimension map triangle has the rule for_op already"):
        table.register(view_dims.triangle, across=True)(for_class)


def test_a_rule_gets_the_arguments_that_it_names_by_name_or_synonym() -> None:
    table = RuleTable("Demo")

    @table.register(aten.flip, aten.sum)
    def rule(call: BoundCall[torch.Tensor], x: torch.Tensor, dim: list[int], keepdim: bool = True) -> object:
        return x, dim, keepdim

    x = torch.ones(2, 3)
    flip = BoundCall(aten.flip.default, (x, [1]), {}, torch.Tensor)
    assert table.lookup(aten.flip.default)(flip) == (x, [1], True)
    total = BoundCall(aten.sum.dim_IntList, (x,), {"dim": [0]}, torch.Tensor)
    assert table.lookup(aten.sum.dim_IntList)(total) == (x, [0], False)
    with pytest.raises(TypeError, match=r"rule takes dim, which aten\.sum\.default lacks"):
        table.lookup(aten.sum.default)


def test_every_rule_of_the_types_names_arguments_of_its_ops() -> None:
    for table in (padded_table, chunked_table):
        for (key, across), rule in table._rules.items():
            overloads = [key] if isinstance(key, torch._ops.OpOverload) else []
            if isinstance(key, torch._ops.OpOverloadPacket):
                overloads = [getattr(key, name) for name in key.overloads() if "out" not in name]
            for op in overloads:
                # TorchScript has overloads of lists and strings.
                of_tensors = any("Tensor" in str(a.type) for a in op._schema.arguments)
                if of_tensors and functional_form(op) is op and table.key_of(op, across) == key:
                    by_name(rule, op)
