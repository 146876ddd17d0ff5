"""Rule tables: how a rule is registered, found, explained and refused."""

from __future__ import annotations

import pytest
import torch

from subtensors.dispatch.ops.errors import RuleError
from subtensors.dispatch.ops.op_classes import OpClass
from subtensors.dispatch.ops.rule_table import ADVICE, Key, RuleTable

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
