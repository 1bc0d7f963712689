import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachefs.sizes import parse_duration


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("5m", 300), ("30min", 1800), ("1.5 h", 5400), (" 7d ", 604800)]
)
def test_times_as_people_write_them(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "5", "0s", "-5m", "5 weeks", "1e3s", "٣s", "nan h", "5m 3s", "9" * 400 + "d"])
def test_what_is_no_time_is_told_in_a_line(text: str) -> None:
    with pytest.raises(ValueError, match=r"^'.*' is not a duration such as 90s, 30min, 12h or 7d$"):
        parse_duration(text)


@given(st.text(max_size=80))
def test_any_text_is_a_time_or_none(text: str) -> None:
    try:
        found = parse_duration(text)
    except ValueError as error:
        found = 1.0 if "\n" not in str(error) else 0.0
    assert found > 0
