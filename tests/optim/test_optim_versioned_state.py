"""The state of an optimizer: a dict like torch's that stamps every change."""

from __future__ import annotations

import copy
import pickle
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import Parameter

import subtensors as st
from subtensors.optim.versions import Entry, States

CHANGES: dict[str, Callable[[Any], Any]] = {
    "set": lambda d: d.__setitem__("a", 2),
    "delete": lambda d: d.__delitem__("a"),
    "pop": lambda d: d.pop("a"),
    "popitem": lambda d: d.popitem(),
    "clear": lambda d: d.clear(),
    "update with a dict": lambda d: d.update({"a": 2}),
    "update with pairs and names": lambda d: d.update([("a", 2)], b=3),
    "setdefault": lambda d: d.setdefault("b", 3),
    "or": lambda d: d.__ior__({"a": 2}),
}

READS: dict[str, Callable[[Any], Any]] = {
    "get": lambda d: (d["a"], d.get("a"), d.get("missing")),
    "iterate": lambda d: (list(d), list(d.items()), list(d.values()), len(d), "a" in d, repr(d), d == {}),
    "setdefault": lambda d: d.setdefault("a", 3),
    "or": lambda d: d | {"b": 2},
    "copy": lambda d: (d.copy(), copy.copy(d), copy.deepcopy(d), pickle.dumps(d)),
}


def made(kind: Any, entries: dict[str, Any]) -> Any:
    return Entry(entries) if kind is Entry else States(dict, entries)


@pytest.mark.parametrize("kind", [Entry, States])
@pytest.mark.parametrize("change", CHANGES)
def test_every_change_acts_as_on_a_dict_and_is_stamped(change: str, kind: Any) -> None:
    watched, plain = made(kind, {"a": 1}), {"a": 1}
    before = watched.version.stamp
    assert CHANGES[change](watched) == CHANGES[change](plain)
    assert watched == plain
    assert watched.version.stamp is not before


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_an_entry_stamps_the_state(change: str) -> None:
    states = States(dict, {"p": {"a": 1}})
    states.setdefault("q", {"a": 1})
    assert states["r"] == {}
    states["r"].update(a=1)
    for key in "pqr":
        before = states.version.stamp
        CHANGES[change](states[key])
        assert states.version.stamp is not before


@pytest.mark.parametrize("kind", [Entry, States])
@pytest.mark.parametrize("read", READS)
def test_reading_is_not_stamped(read: str, kind: Any) -> None:
    watched = made(kind, {"a": 1})
    before = watched.version.stamp
    READS[read](watched)
    assert watched.version.stamp is before
    assert watched == {"a": 1}


def test_a_key_that_is_not_there_is_missing_in_an_entry_and_an_empty_entry_in_a_state() -> None:
    with pytest.raises(KeyError):
        Entry()["a"]
    with pytest.raises(KeyError):
        States().pop("p")
    assert States().pop("p", None) is None
    states = States()
    assert type(states["p"]) is Entry
    assert states["p"] is states["p"]


def test_an_entry_of_another_state_is_copied_so_that_each_marks_its_own_changes() -> None:
    one, other = States(dict, {"p": {"a": 1}}), States()
    other["p"] = one["p"]
    before = one.version.stamp
    other["p"]["a"] = 2
    assert one["p"] == {"a": 1}
    assert one.version.stamp is before


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda d: d.copy(), lambda d: pickle.loads(pickle.dumps(d))]
)
def test_copies_are_plain(copied: Callable[[Any], Any]) -> None:
    entry, states = copied(Entry({"a": 1})), copied(States(dict, {"p": 1}))
    assert (type(entry), entry) == (dict, {"a": 1})
    assert (type(states), states) == (defaultdict, {"p": 1})
    assert states["q"] == {}
    assert type(states["q"]) is dict


def test_what_an_optimizer_hands_out_is_plain_and_its_own_state_is_watched() -> None:
    p = Parameter(torch.ones(2))
    p.grad = torch.ones(2)
    optimizer = st.optim.Adam([p])
    optimizer.step()
    assert type(optimizer.state_dict()["state"][0]) is dict
    pickled = pickle.dumps(optimizer)
    assert b"watched_state" not in pickled
    copied = pickle.loads(pickled)
    copied.load_state_dict(optimizer.state_dict())
    for o in (optimizer, copied, copy.deepcopy(optimizer)):
        assert type(o.state) is States
        assert {type(entry) for entry in o.state.values()} == {Entry}
        assert all(entry.version is o.state.version for entry in o.state.values())
