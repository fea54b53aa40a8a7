"""Registries: a name is taken once, found again, and an unknown one is answered with the list."""

from __future__ import annotations

from dataclasses import dataclass, fields
from inspect import Parameter, signature
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fairseq_sg.registry import Mechanism, Registry, UnknownName

names = st.text(min_size=1, max_size=12)


def registry() -> Registry:
    return Registry("gadget", "--gadget")


def new_class() -> type:
    return type("Gadget", (Mechanism,), {"__module__": "workshop"})


@settings(derandomize=True)
@given(st.lists(names, unique=True, max_size=8), names)
def test_every_registered_name_is_found_and_no_other(registered, other):
    gadgets = registry()
    classes = {name: gadgets.register(name)(new_class()) for name in registered}
    for name, cls in classes.items():
        assert gadgets.find(name) is cls and cls.registered_name == name
    assert dict(gadgets) == classes and list(gadgets) == registered
    if other in classes:
        with pytest.raises(ValueError, match="is already registered, as "):
            gadgets.register(other)(new_class())
        assert gadgets.find(other) is classes[other]
    else:
        with pytest.raises(UnknownName) as error:
            gadgets.find(other)
        assert str(error.value) == f"unknown gadget {other!r} (--gadget): choose from {', '.join(sorted(registered))}"
        assert isinstance(error.value, ValueError)
        assert other not in gadgets  # asking adds nothing


def test_register_decorates_and_returns_the_class_itself():
    gadgets = registry()

    @gadgets.register("lever")
    class Lever(Mechanism):
        pass

    assert gadgets == {"lever": Lever} and Lever.registered_name == "lever" and Lever().__class__ is Lever


def test_duplicate_name_names_the_class_that_has_it():
    gadgets = registry()
    first, second = new_class(), new_class()
    gadgets.register("lever")(first)
    with pytest.raises(ValueError, match=r"gadget 'lever' is already registered, as workshop\.Gadget"):
        gadgets.register("lever")(second)
    assert gadgets.find("lever") is first and not hasattr(second, "registered_name")


def test_a_class_of_another_base_is_refused_and_leaves_nothing():
    gadgets = registry()
    with pytest.raises(ValueError, match="gadget 'lever': object is not derived from the base class of its kind"):
        gadgets.register("lever")(object)
    assert not gadgets


def test_registering_the_same_class_again_does_no_harm():
    gadgets, cls = registry(), new_class()
    assert gadgets.register("lever")(cls) is gadgets.register("lever")(cls) is cls
    assert len(gadgets) == 1


def test_mechanisms_of_one_kind_have_distinct_classes_and_carry_their_names():
    from fairseq_sg.modules import attention, depth, feature_maps, feedforward, normalization, position, update

    registries = (
        attention.ATTENTION_REGISTRY,
        depth.DEPTH_REGISTRY,
        position.POSITION_REGISTRY,
        feature_maps.FEATURE_MAP_REGISTRY,
        feedforward.FEEDFORWARD_REGISTRY,
        normalization.QK_NORM_REGISTRY,
        update.UPDATE_REGISTRY,
    )
    for kind in registries:
        assert kind and len(set(kind.values())) == len(kind), kind.kind
        assert all(cls.registered_name == name for name, cls in kind.items()), kind.kind
        assert kind.option.startswith("--")
    assert len({kind.kind for kind in registries}) == len(registries)


@dataclass
class Common:
    teeth: int = 3


@dataclass
class Special(Common):
    speed: float = 1.5


class Gadget(Mechanism):
    options = Common

    def __init__(self, size, **options):
        self.size, self.given = size, options


class Fast(Gadget):
    options = Special


class Bare(Gadget):
    options = None


def test_build_takes_options_from_a_configuration_by_one_rule():
    """A class has its own options, those that it inherits, or none."""
    gadgets, config = registry(), SimpleNamespace(teeth=4, speed=2.5, other=0)
    for name, cls in {"fast": Fast, "inherits": type("Inherits", (Gadget,), {}), "bare": Bare}.items():
        gadgets.register(name)(cls)
    expected = {"fast": {"teeth": 4, "speed": 2.5}, "inherits": {"teeth": 4}, "bare": {}}
    for name, options in expected.items():
        built = gadgets.build(name, config, 7, colour="red")
        assert (built.size, built.given) == (7, options | {"colour": "red"})
        assert gadgets[name].option_classes(config) == {gadgets[name]}
    with pytest.raises(UnknownName, match=r"unknown gadget 'slow' \(--gadget\): choose from bare, fast, inherits"):
        gadgets.build("slow", config, 7)


def test_every_mechanism_of_a_model_has_the_common_interface():
    from fairseq_sg.models.checks import REGISTRIES

    for kind in REGISTRIES:
        assert all(issubclass(cls, Mechanism) for cls in kind.values()), kind.kind


def test_a_mechanism_built_by_hand_has_the_defaults_of_its_options():
    from fairseq_sg.models.checks import REGISTRIES

    compared = 0
    for cls in (cls for kind in REGISTRIES for cls in kind.values() if cls.options is not None):
        arguments = [signature(base.__init__).parameters for base in cls.__mro__]
        for option in fields(cls.options):
            # Of the class that names it.
            named = [found[option.name].default for found in arguments if option.name in found]
            if named and named[0] is not Parameter.empty:
                assert named[0] == option.default, (cls.__name__, option.name)
                compared += 1
    assert compared > 100
