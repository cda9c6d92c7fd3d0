from __future__ import annotations

import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.fingerprint import canonical, digest, first_difference, key64

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    # No lone surrogates: they are no text.
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), max_size=4), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(value=JSON)
def test_canonical_text_is_json_of_the_same_value(value):
    assert json.loads(canonical(value)) == value


@given(value=st.dictionaries(st.text("abcd", max_size=3), JSON, max_size=6))
def test_the_order_of_keys_plays_no_part(value):
    """[T2.c]"""
    turned = dict(reversed(value.items()))
    assert canonical(turned) == canonical(value)
    assert digest(turned) == digest(value)


def test_the_text_and_digest_are_fixed_for_ever():
    """[T2.c]"""
    value = {"b": [1, 2.5, True, None], "a": {"ö": "x", "": -1}}
    assert canonical(value) == '{"a":{"":-1,"ö":"x"},"b":[1,2.5,true,null]}'.encode()
    assert digest(value) == "6de16fcd380a91eda380eeea5a4f0f8f"
    assert key64("stage", "base", 1234) == 183_228_540_414_204_255


def test_the_digest_is_the_same_in_another_process_with_another_hash_seed():
    """[T2.c]"""
    program = "from tokenmill.fingerprint import digest; print(digest({c: i for i, c in enumerate('zyxabc')}))"
    found = {
        subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            check=True,
            env={"PYTHONHASHSEED": seed},
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert found == {digest({c: i for i, c in enumerate("zyxabc")})}


@given(left=JSON, right=JSON)
def test_equal_digests_mean_equal_values_and_no_difference(left, right):
    same = canonical(left) == canonical(right)
    assert (digest(left) == digest(right)) == same
    if same:
        assert first_difference(left, right) is None


@given(value=JSON)
def test_a_value_does_not_differ_from_itself(value):
    assert first_difference(value, json.loads(canonical(value))) is None


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ({"a": 1}, {"a": 2}, ("a", 1, 2)),
        ({"a": 1}, {"a": 1, "b": 2}, ("b", "(absent)", 2)),
        ({"a": 1, "b": 2}, {"a": 1}, ("b", 2, "(absent)")),
        ({"s": [{"w": {"x": 0.3}}]}, {"s": [{"w": {"x": 0.4}}]}, ("s[0].w.x", 0.3, 0.4)),
        ([1, 2], [1, 2, 3], ("[2]", "(absent)", 3)),
        ([1, 2, 3], [1], ("[1]", 2, "(absent)")),
        ({"a": 1, "b": 1}, {"b": 2, "a": 2}, ("a", 1, 2)),
        ({"a": {}}, {"a": []}, ("a", {}, [])),
        (True, 1, ("", True, 1)),
        (1, 1.0, ("", 1, 1.0)),
        (None, 0, ("", None, 0)),
    ],
)
def test_the_first_difference_is_named_by_its_path_with_both_sides(old, new, found):
    assert first_difference(old, new) == found


@given(parts=st.lists(st.text("abc", max_size=3) | st.integers(0, 9), min_size=1, max_size=4))
def test_a_key_is_64_bits_and_tells_names_from_each_other(parts):
    key = key64(*parts)
    assert 0 <= key < 2**64
    assert key == key64(*parts)
    assert key != key64(*parts, "")
    assert key64("ab", "c") != key64("a", "bc")
    assert key64("1") != key64(1)


def test_the_text_of_none_is_null():
    assert canonical(None) == b"null"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_number_that_json_cannot_say_is_refused(value):
    with pytest.raises(AssertionError):
        canonical(value)


def test_a_key_that_is_no_string_has_no_canonical_text():
    with pytest.raises(AssertionError, match="1"):
        canonical([{1: "looks like the key '1'"}])
