"""The shipped policies, their schema for editors and the documentation: that all three know the same keys, that everything shown
is right, and that what is documented as not enforced is exactly what the program calls so. jsonschema is the judge."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from fairlane.config.fields import Doc
from fairlane.config.scalars import resolve
from fairlane.config.schema import EitherShape, ListShape, MapShape, ObjectShape, Shape, field_at, shape_of
from fairlane.config.source import Entries, Items, Node, parse
from fairlane.config.strict import load_located
from fairlane.errors import ConfigError
from fairlane.gateway.policy.editor import schema_text
from fairlane.gateway.policy.loader import load_policy_file, load_policy_text
from fairlane.gateway.policy.schema import PolicyFile

ROOT = Path(__file__).parents[3]
TODAY = datetime.date(2026, 6, 1)
DOCS = (ROOT / "docs" / "policies.md").read_text()
EXAMPLE = re.findall(r"```yaml\n(.*?)```", DOCS, re.DOTALL)[0]
TENANTS = ROOT / "configs" / "tenants.yaml"
SHIPPED = [TENANTS, *sorted((ROOT / "configs" / "policies").glob("*.yaml"))]
VALIDATOR = Draft202012Validator(json.loads(schema_text()))


def plain(node: Node) -> Any:
    """What an editor's YAML parser makes of a file."""
    if isinstance(node, Entries):
        return {key: plain(entry.value) for key, entry in node.entries.items()}
    if isinstance(node, Items):
        return [plain(item) for item in node.items]
    return resolve(node).value


def complaints(text: str) -> list[str]:
    return [error.json_path for error in VALIDATOR.iter_errors(plain(parse(text.encode(), "p")[0]))]


def keys(shape: Shape) -> Iterator[tuple[str, str, Doc]]:
    """Every key of the schema: the class it is in, its name and its documentation."""
    match shape:
        case ObjectShape():
            for field in shape.fields.values():
                yield shape.type.__name__, field.name, field.doc
                yield from keys(field.shape)
        case ListShape():
            yield from keys(shape.item)
        case MapShape():
            yield from keys(shape.value)
        case EitherShape():
            yield from keys(shape.full)
        case _:
            return


ALL = {(part, name): doc for part, name, doc in keys(shape_of(PolicyFile))}


def shown(text: str) -> set[tuple[str, str]]:
    """The keys that a file shows, by the class they are in."""
    found = set()
    for where in load_located(text.encode(), "p", PolicyFile).marks:
        if field_at(PolicyFile, where) is not None:
            found.add((_part(where[:-1]), str(where[-1])))
    return found


def _part(where: tuple[str | int, ...]) -> str:
    shape: Shape = shape_of(PolicyFile)
    for step in where:
        if isinstance(shape, EitherShape):
            shape = shape.full
        if isinstance(shape, ObjectShape):
            shape = shape.fields[str(step)].shape
        elif isinstance(shape, MapShape):
            shape = shape.value
        elif isinstance(shape, ListShape):
            shape = shape.item
    shape = shape.full if isinstance(shape, EitherShape) else shape
    assert isinstance(shape, ObjectShape)
    return str(shape.type.__name__)


def switched_on() -> str:
    """configs/tenants.yaml with every key on that is off there: a line that begins with # and no space."""
    return re.sub(r"^(\s*)#(?=[^ #\n])", r"\1", TENANTS.read_text(), flags=re.MULTILINE)


# -- the shipped files ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_a_shipped_policy_is_right_enforced_whole_and_says_nothing(path: Path) -> None:
    policy = load_policy_file(path, TODAY)
    assert (policy.warnings, policy.not_enforced, policy.nodes_without_keys() != ()) == ((), (), True)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_a_shipped_policy_names_the_schema_beside_it(path: Path) -> None:
    first = path.read_text().splitlines()[0]
    name = first.removeprefix("# yaml-language-server: $schema=")
    assert (path.parent / name).resolve() == ROOT / "configs" / "tenants.schema.json"


def test_the_keys_that_are_off_in_the_shipped_file_are_right_too() -> None:
    policy = load_policy_text(switched_on().encode(), "p", TODAY)
    assert len(policy.not_enforced) == 7


def test_keys_that_are_off_in_the_variants_are_right_too() -> None:
    text = re.sub(r"^(\s*)#(?=[^ #\n])", r"\1", (ROOT / "configs/policies/saas.yaml").read_text(), flags=re.MULTILINE)
    policy = load_policy_text(text.encode(), "p", TODAY)
    assert (policy.warnings, policy.nodes_without_keys()) == ((), ())


def test_every_key_is_in_the_shipped_file() -> None:
    words = set(re.findall(r"[a-z_]+(?=:)", TENANTS.read_text()))
    assert {name for _, name in ALL} - words == set()


# -- the documentation ---------------------------------------------------------------------------------------------------


def test_the_documented_example_is_right() -> None:
    assert load_policy_text(EXAMPLE.encode(), "p", TODAY).warnings == ()


def test_the_documented_example_shows_every_key() -> None:
    # What a tenant's template or an organisation may have too is shown where it is used most.
    classes_of = {name: {part for part, other in ALL if other == name} for _, name in ALL}
    seen = {name for _, name in shown(EXAMPLE)}
    assert (set(classes_of) - seen, {part for part, _ in ALL} - {part for part, _ in shown(EXAMPLE)}) == (
        {"plugin"},  # which stands in the place of others
        set(),
    )


def test_every_key_has_a_row_or_is_named_in_the_documentation() -> None:
    named = set(re.findall(r"`([a-z_]+)(?=[`:])", DOCS))
    assert {name for _, name in ALL} - named == set()


def test_the_documentation_says_which_keys_are_not_enforced() -> None:
    later = {name for (_, name), doc in ALL.items() if not doc.enforced}
    rows = re.findall(r"^\| (`[a-z_`, ]+`) \|(.*)$", DOCS, re.MULTILINE)
    said = {name for names, text in rows if "Not enforced yet" in text for name in re.findall(r"`([a-z_]+)`", names)}
    assert said == later


def test_every_key_says_what_it_is_for() -> None:
    assert [key for key, doc in ALL.items() if not doc.text.endswith(".")] == []


# -- the schema for editors ----------------------------------------------------------------------------------------------


def test_the_shipped_schema_is_the_programs() -> None:
    # `fairlane policy schema > configs/tenants.schema.json` after a change.
    assert (ROOT / "configs" / "tenants.schema.json").read_text() == schema_text()


def test_it_is_a_schema() -> None:
    Draft202012Validator.check_schema(json.loads(schema_text()))
    assert set(VALIDATOR.schema["$defs"]) == {part for part, _ in ALL}


@pytest.mark.parametrize(
    "text", [*(path.read_text() for path in SHIPPED), EXAMPLE, switched_on()], ids=[*(p.name for p in SHIPPED), "docs", "all on"]
)
def test_what_the_loader_takes_the_schema_takes(text: str) -> None:
    assert complaints(text) == []


BASE = "version: 1\ntiers: {t: {priority: 1}}\norganisations: {o: {tenants: {x: {tiers: [t]}}}}\n"


def tier(extra: str) -> str:
    return BASE.replace("priority: 1", f"priority: 1, {extra}")


def tenant(extra: str) -> str:
    return BASE.replace("tiers: [t]", f"tiers: [t], {extra}")


@pytest.mark.parametrize(
    ("text", "path"),
    [
        (BASE.replace("version: 1", "version: 2"), "$.version"),
        (BASE.replace("version: 1\n", ""), "$"),
        (BASE + "extra: 1\n", "$"),
        (tier("weigth: 1"), "$.tiers.t"),
        (tier("weight: 0"), "$.tiers.t.weight"),
        (tier('weight: "2"'), "$.tiers.t.weight"),
        (tier("min: 5"), "$.tiers.t.min"),
        (tier("patience: 10"), "$.tiers.t.patience"),
        (tier("patience: soon"), "$.tiers.t.patience"),
        (tier("shaping: loud"), "$.tiers.t.shaping"),
        (tier("shaping: {prefill_share: half}"), "$.tiers.t.shaping"),
        (tier("max_output_tokens: 0"), "$.tiers.t.max_output_tokens"),
        (tier("max_output_tokens: 1.5"), "$.tiers.t.max_output_tokens"),
        (tenant("tokens_per_minute: lots"), "$.organisations.o.tenants.x.tokens_per_minute"),
        (tenant("tokens_per_minute: 12:30"), "$.organisations.o.tenants.x.tokens_per_minute"),
        (tenant("tokens_per_minute: 1_000"), "$.organisations.o.tenants.x.tokens_per_minute"),
        (tenant("keys: [{id: k}]"), "$.organisations.o.tenants.x.keys[0]"),
        (tenant("keys: [{id: k, hash: word}]"), "$.organisations.o.tenants.x.keys[0].hash"),
        (tenant("cache_domain: mine"), "$.organisations.o.tenants.x.cache_domain"),
        (tenant("kv_limit: most"), "$.organisations.o.tenants.x.kv_limit"),
        (tenant("budgets: {}"), "$.organisations.o.tenants.x.budgets"),
        (tenant("members: 5"), "$.organisations.o.tenants.x.members"),
        (BASE.replace("x:", "'x y':"), "$.organisations.o.tenants"),
        (BASE + "scheduler: {tiers: vipp}\n", "$.scheduler.tiers"),
        (BASE + "timezone: 5\n", "$.timezone"),
    ],
)
def test_what_the_loader_refuses_for_its_form_the_schema_refuses_there(text: str, path: str) -> None:
    with pytest.raises(ConfigError):
        load_policy_text(text.encode(), "p", TODAY)
    assert complaints(text) == [path]


def test_the_base_of_the_broken_files_is_good_for_both() -> None:
    assert (load_policy_text(BASE.encode(), "p", TODAY).warnings, complaints(BASE)) == ((), [])
