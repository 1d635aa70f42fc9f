"""Names forgive whatever spacing, case and maker's name people write."""

from __future__ import annotations

import re
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

import hardware_db
from simulator.errors import UserError

SEPARATORS = st.sampled_from(["-", " ", "_", "/", "--", " - "])


@given(st.sampled_from(hardware_db.gpus()), SEPARATORS, st.booleans(), st.booleans())
def test_spelling_does_not_matter(name: str, separator: str, upper: bool, maker: bool) -> None:
    text = separator.join(name.split("-"))
    text = text.upper() if upper else text
    assert hardware_db.gpu(f"NVIDIA {text}" if maker else text).name == name


@given(st.sampled_from(hardware_db.gpus()), st.randoms(use_true_random=False))
def test_word_order_does_not_matter(name: str, random: Random) -> None:
    words = name.split("-")
    random.shuffle(words)
    assert hardware_db.gpu(" ".join(words)).name == name


@given(st.text(max_size=40))
def test_any_text_finds_an_entry_or_a_user_error(text: str) -> None:
    for find in (hardware_db.gpu, hardware_db.node, hardware_db.link, hardware_db.parse_fabric):
        try:
            found = find(text)
        except UserError as error:
            assert str(error)
        else:
            assert found.name


@given(st.integers(1, 64), st.sampled_from([10, 25, 40, 100, 200, 400, 800]))
def test_fabric_words_keep_their_numbers(count: int, gbps: int) -> None:
    fabric = hardware_db.parse_fabric(f"{count} x {gbps} Gb/s InfiniBand")
    assert fabric.nics_per_node == count
    assert fabric.nic_bytes_per_s == pytest.approx(gbps * 1e9 / 8)
    again = re.sub(r"\s", "", f"{count} x {gbps} Gb InfiniBand")
    assert hardware_db.parse_fabric(again).name == fabric.name
