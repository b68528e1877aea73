"""What a user hands over, read strictly: files of JSON, token ids, temperatures."""

import numpy as np
import pytest

from contracts import check_temperature, token_ids
from contracts.errors import BadCheckpoint, BadConfig
from contracts.user_files import parse_json, read_json_lines, read_json_object, read_text


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"[1]", "a JSON object"),
        (b"5", "a JSON object"),
        (b'{"a": {"b": 1, "b": 1}}', "key b: found the key twice"),
        (b'{"a": "\xff"}', "UTF-8"),
        (b"\xef\xbb\xbf{}", "BOM"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not JSON"),
    ],
)
def test_json_that_readers_take_differently_is_refused_with_the_file(content, says, tmp_path):
    file = tmp_path / "settings.json"
    file.write_bytes(content)
    with pytest.raises(BadCheckpoint, match=says) as refusal:
        read_json_object(file, refusal=BadCheckpoint)
    assert "settings.json" in refusal.value.field


def test_a_folder_and_a_missing_file_are_no_files(tmp_path):
    for path in (tmp_path, tmp_path / "absent", tmp_path / "nul\0"):
        with pytest.raises(BadConfig, match="cannot be read"):
            read_text(path, refusal=BadConfig, allowed="text")


def test_decimals_are_taken_or_refused():
    assert parse_json("[1.5, NaN]", where="here", refusal=BadConfig)[0] == 1.5
    with pytest.raises(BadConfig, match="f64"):
        parse_json("[1.5]", where="here", refusal=BadConfig, decimals=False)


def test_a_line_of_jsonl_ends_at_a_line_feed_and_nowhere_else(tmp_path):
    file = tmp_path / "lines.jsonl"
    file.write_text('{"a": "one\u2028two\x85"}\r\n\n{"a": 2}\n{"a": 3}', encoding="utf-8", newline="")
    found = list(read_json_lines(file, refusal=BadConfig))
    assert [values["a"] for _, values in found] == ["one\u2028two\x85", 2, 3]
    assert found[1][0].endswith("line 3")


@pytest.mark.parametrize("ids", [[1, 2], (1, 2), np.array([1, 2]), np.array([1, 2], np.uint8), [np.int64(1), 2]])
def test_token_ids_are_whole_numbers_of_any_library(ids):
    found = token_ids(ids, field="tokens", vocab_size=3)
    assert found == (1, 2)
    assert all(type(token) is int for token in found)


@pytest.mark.parametrize(
    ("ids", "says"),
    [
        ([1, 1.0], r"tokens\[1\]: found 1.0"),
        ([True], "found True"),
        ("12", "found '12'"),
        (None, "found None"),
        (5, "found 5"),
        (np.array([1.5]), "whole numbers"),
        (np.array([[1]]), "whole numbers"),
        ([0, -1], r"tokens\[1\]: found token -1"),
        ([float("inf")], "found inf"),
        ([3], "token 3; allowed: a list of token ids from 0 to 2"),
        ([2**70], "vocabulary ends there"),
    ],
)
def test_what_is_no_token_id_is_refused_and_never_rounded(ids, says):
    with pytest.raises(BadConfig, match=says):
        token_ids(ids, field="tokens", vocab_size=3)
    with pytest.raises(BadConfig, match="2147483647"):
        token_ids([2**31], field="tokens")


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf"), 1e-50, 1e39, True, "1", None, 10**400])
def test_a_temperature_that_float32_does_not_hold_is_refused(value):
    with pytest.raises(BadConfig, match="temperature"):
        check_temperature(value)
    assert check_temperature(0.7) == float(np.float32(0.7))
    assert check_temperature(np.float32(2)) == 2.0
