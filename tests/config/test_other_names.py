"""Names that other tools have for settings of the kit."""

import dataclasses

from kit.config.other_names import NAMES, OWNERS
from kit.config.plan import Plan
from kit.config.recipe import Recipe
from kit.config.spec import ModelSpec


def test_other_names_belong_to_existing_fields() -> None:
    records = {record.__name__: record for record in (ModelSpec, Plan, Recipe)}
    fields = []
    for place, owner in OWNERS.items():
        fields += [f"{place}.{field.name}" for field in dataclasses.fields(records[owner])]
    assert not {setting.partition("=")[0] for setting in NAMES} - set(fields)
    names = [name for texts in NAMES.values() for name in texts.split()]
    assert not {name for name in names if names.count(name) > 1}
    own = {field.partition(".")[2] for field in fields}
    assert not own & set(names), "a field is no other tool's name for another field"
