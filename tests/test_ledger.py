"""Patches come off exactly as they went on."""

from __future__ import annotations

import itertools
import types

import pytest

from moss_tts_patches.errors import SeamError
from moss_tts_patches.ledger import Ledger


def make_classes():
    class Base:
        @classmethod
        def load(cls):
            return cls.__name__

        def run(self):
            return "base"

    class Child(Base):
        def run(self):
            return "child"

        @staticmethod
        def help():
            return "help"

    return Base, Child


def test_undo_restores_what_the_owner_held():
    _, child = make_classes()
    before = dict(vars(child))
    ledger = Ledger()
    ledger.apply(child, "run", lambda self: "ours", "test")
    ledger.apply(child, "help", staticmethod(lambda: "ours"), "test")
    ledger.apply(child, "load", classmethod(lambda cls: "ours"), "test")
    assert (child().run(), child.help(), child.load()) == ("ours", "ours", "ours")
    ledger.undo()
    assert dict(vars(child)) == before
    assert len(ledger) == 0


def test_an_inherited_class_method_is_not_pinned_to_a_class():
    base, child = make_classes()
    ledger = Ledger()
    ledger.apply(child, "load", classmethod(lambda cls: "ours"), "test")
    ledger.undo()
    assert "load" not in vars(child)

    class GrandChild(child):
        pass

    assert GrandChild.load() == "GrandChild"
    assert base.load() == "Base"


def test_applying_twice_is_a_no_op():
    _, child = make_classes()
    original = vars(child)["run"]
    ledger = Ledger()
    ledger.apply(child, "run", lambda self: "first", "test")
    ledger.apply(child, "run", lambda self: "second", "test")
    assert child().run() == "first"
    ledger.undo()
    assert vars(child)["run"] is original


@pytest.mark.parametrize("order", list(itertools.permutations(["run", "load", "help"])))
def test_any_order_of_patches(order):
    base, child = make_classes()
    before = dict(vars(child)), dict(vars(base))
    ledger = Ledger()
    for name in order:
        ledger.apply(child, name, object(), name)
    ledger.apply(base, "run", object(), "base too")
    ledger.undo()
    assert (dict(vars(child)), dict(vars(base))) == before


def test_an_overwritten_patch_is_named():
    module = types.ModuleType("trainer")
    module.AdamW = "theirs"
    ledger = Ledger()
    ledger.apply(module, "AdamW", "ours", "test")
    ledger.verify()
    module.AdamW = "somebody else's"
    with pytest.raises(SeamError, match=r"trainer\.AdamW no longer holds"):
        ledger.verify()
