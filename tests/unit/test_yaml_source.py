"""The narrow YAML: numbers as people write them, positions, and everything that is refused."""

from __future__ import annotations

import math
import time
from pathlib import Path

import pytest

from simulator.errors import UserError
from simulator.spec.yaml_source import load_source, parse_source, read_text


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e9", 1e9),
        ("1.0e12", 1e12),
        ("-1e-5", -1e-5),
        ("1_000", 1000),
        ("010", 10),
        (".5", 0.5),
        ("1E400", math.inf),
        ("-.inf", -math.inf),
        ("true", True),
        ("no", "no"),
        ("on", "on"),
        ("12:30:45", "12:30:45"),
        ("2024-01-01", "2024-01-01"),
        ("0x10", "0x10"),
        ('"5"', "5"),
        ("~", None),
        ("null", None),
        ("1" * 5000, "1" * 5000),
    ],
)
def test_scalar(text: str, value: object) -> None:
    parsed = parse_source(f"a: {text}").data["a"]
    assert parsed == value
    assert type(parsed) is type(value)


def test_nan_is_a_number_that_fields_can_refuse() -> None:
    assert math.isnan(parse_source("a: .nan").data["a"])


def test_positions_of_values_and_keys() -> None:
    source = parse_source("model: x\ncluster:\n  groups:\n    - {node: dgx, count: 4}\n", "f.yaml")
    assert source.position(("cluster", "groups", 0, "count")) == (4, 26)
    assert source.position(("cluster", "groups", 0, "count"), at_key=True) == (4, 19)
    assert source.position(("cluster", "groups", 0, "absent")) == (4, 7)
    assert source.position(("model",)) == (1, 8)


def test_json_reads_through_the_same_path() -> None:
    source = parse_source('{"a": 1,\n\t"b": [1E3, "x\\/y", null, true],\n "c": {"d": 1.5}}')
    assert source.data == {"a": 1, "b": [1000.0, "x/y", None, True], "c": {"d": 1.5}}
    assert source.position(("c", "d")) == (3, 13)


def test_alias_is_expanded_with_positions_of_the_anchor() -> None:
    source = parse_source("a: &n [1, 2]\nb: *n\n")
    assert source.data["b"] == [1, 2]
    assert source.position(("b", 1)) == (1, 11)


def _bomb(levels: int) -> str:
    lines = ["a: &a [x, x, x, x, x, x, x, x, x]"]
    for i in range(levels):
        prior, name = chr(97 + i), chr(98 + i)
        lines.append(f"{name}: &{name} [{', '.join(['*' + prior] * 9)}]")
    return "\n".join(lines)


REFUSED = {
    "alias bomb": (_bomb(9), "aliases expand"),
    "alias to itself": ("a: &a [*a]", "contains itself"),
    "alias without anchor": ("a: *b", "alias"),
    "python tag": ("a: !!python/object/apply:os.system [ls]", "!!python/object/apply"),
    "plain tag": ("a: !!str 5", "tag !!str"),
    "local tag": ("a: !x 5", "tag !x"),
    "duplicate key": ("a: 1\nb: 2\na: 3", "given twice (first on line 1)"),
    "duplicate key in flow": ("m: {a: 1, a: 2}", "given twice"),
    "two documents": ("a: 1\n---\nb: 2", "second document"),
    "list on top": ("- a\n- b", "expected a mapping"),
    "text on top": ("just words", "expected a mapping"),
    "empty": ("", "is empty"),
    "only comments": ("# x\n# y\n", "is empty"),
    "deep flow": ("a: " + "[" * 30, "deeper than"),
    "very deep flow": ("a: " + "[" * 100_000, "nesting"),
    "deep block": ("\n".join(" " * i + "a:" for i in range(500)), "deeper than"),
    "many values": ("a: [" + "1," * 490_000 + "1]", "more than 50,000"),
    "complex key": ("? [a]\n: 1", "must be plain text"),
    "merge key": ("a: &a {x: 1}\nb: {<<: *a}", "merge keys"),
    "open quote": ("a: '" + "x" * 900_000, "not valid YAML"),
    "tab": ("a:\n\tb: 1", "tab characters"),
    "control character": ("a: 1\nb: \x07", "not valid YAML"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_a_place_within_a_second(name: str) -> None:
    text, message = REFUSED[name]
    start = time.process_time()
    with pytest.raises(UserError) as caught:
        parse_source(text, "f.yaml")
    assert time.process_time() - start < 1.0
    (problem,) = caught.value.problems
    assert message in problem.message
    assert problem.source == "f.yaml"
    assert problem.line is not None
    assert problem.column is not None


def test_control_character_is_located() -> None:
    with pytest.raises(UserError) as caught:
        parse_source("a: 1\nb: \x07", "f.yaml")
    assert str(caught.value).startswith("f.yaml:2:4:")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a: \xff\xfe", "is not UTF-8 text"),
        (b"a: 1\x00\x01", "is a binary file"),
        (b"x" * 1_000_001, "is too large"),
    ],
)
def test_unreadable_content(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "f.yaml"
    path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        load_source(path)


def test_huge_file_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "f.yaml"
    with path.open("wb") as stream:
        stream.truncate(100_000_000)
    start = time.process_time()
    with pytest.raises(UserError, match=r"100.0 MB"):
        load_source(path)
    assert time.process_time() - start < 0.5


@pytest.mark.parametrize("name", ["", "absent.yaml", "a\0b.yaml", "x" * 5000 + ".yaml"])
def test_file_that_cannot_be(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError):
        read_text(str(tmp_path / name))


def test_byte_order_mark_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "f.yaml"
    path.write_bytes(b"\xef\xbb\xbfa: 1\n")
    assert load_source(path).data == {"a": 1}
