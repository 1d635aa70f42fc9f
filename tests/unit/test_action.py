from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.graph.action import Action, Kind, dump_schedule, load_schedule, parse_action
from simulator.graph.schedules import interleaved, zb_h1

ACTIONS = st.builds(
    Action,
    st.integers(0, 500),
    st.sampled_from(Kind),
    st.one_of(st.none(), st.integers(0, 9999)),
)


@given(ACTIONS)
def test_text_round_trip(action: Action) -> None:
    assert parse_action(str(action)) == action


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("0F3", Action(0, Kind.F, 3)),
        ("4I1", Action(4, Kind.I, 1)),
        ("12SEND_F7", Action(12, Kind.SEND_F, 7)),
        (" 5UNSHARD ", Action(5, Kind.UNSHARD)),
        ("3REDUCE_GRAD", Action(3, Kind.REDUCE_GRAD)),
    ],
)
def test_reads_torchs_text(text: str, action: Action) -> None:
    assert parse_action(text) == action


@pytest.mark.parametrize("text", ["", "F3", "0X3", "0F3.5", "-1F0", "0f3", "0F3 1B2"])
def test_refuses_what_is_no_action(text: str) -> None:
    with pytest.raises(ValueError, match="is no action"):
        parse_action(text)


def test_chunk_and_rank_follow_from_the_global_stage() -> None:
    action = Action(9, Kind.F, 0)
    assert (action.rank(4), action.chunk(4)) == (1, 2)


@pytest.mark.parametrize("schedule", [interleaved(4, 2, 8), zb_h1(3, 5)])
def test_csv_round_trip(schedule: tuple[tuple[Action, ...], ...]) -> None:
    assert load_schedule(dump_schedule(schedule)) == schedule
