"""What is a device, or a list of them, and what is refused as none."""

from __future__ import annotations

import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

import accelcore
from accelcore.devices.request import Choice, parse
from accelcore.errors import (
    AccelError,
    ConfigurationError,
)

names = st.from_regex(r"\A[a-z][a-z0-9_]{0,31}\Z").filter(lambda name: name != "auto")
choices = st.builds(Choice, names, st.one_of(st.none(), st.integers(0, 9999)))
wishes = st.lists(choices, min_size=1, max_size=6, unique=True).filter(lambda wish: len(said(wish)) <= 256)


def said(wish):
    return ",".join(f"{choice.name}" if choice.index is None else f"{choice.name}:{choice.index}" for choice in wish)


@given(wish=wishes, capitals=st.integers(0), left=st.text(" \t", max_size=3), right=st.text(" \t", max_size=3))
def test_a_request_within_the_grammar_is_read_as_it_was_said(wish, capitals, left, right):
    text = "".join(letter.upper() if capitals >> i & 1 else letter for i, letter in enumerate(said(wish)))
    assert parse(left + text.replace(",", f"{right},{left}") + right) == tuple(wish)


@pytest.mark.parametrize("text", ["auto", "AUTO", " Auto\t"])
def test_auto_is_read_in_any_case(text):
    assert parse(text) is None


@given(wish=wishes, place=st.integers(0, 300), foreign=st.characters(exclude_characters="abcdefghijklmnopqrstuvwxyz"
       "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_:, \t"))  # fmt: skip
def test_a_foreign_character_anywhere_makes_no_device(wish, place, foreign):
    text = said(wish)
    with pytest.raises(ConfigurationError, match=r"\Adevice=.* is not a device"):
        parse(text[:place] + foreign + text[place:])


@given(wish=wishes, other=names, data=st.data())
def test_a_request_just_outside_the_grammar_makes_no_device(wish, other, data):
    text = said(wish)
    wrong = data.draw(
        st.sampled_from(
            [
                text + ",",
                "," + text,
                f"{text},,{other}",
                f"{text},{other}:",
                f"{text},{other}:-1",
                f"{text},{other}:+1",
                f"{text},{other}:00",
                f"{text},{other}:01",
                f"{text},{other}:10000",
                f"{text},{other}:1:1",
                f"{text},:1",
                f"{text},1{other}",
                f"{text},_{other}",
                f"{text},{other}{'x' * 32}",
                f"{text},auto",
                f"auto,{text}",
                "auto:0",
                f"{text},{text}",
                f"{text},{text.upper()}",
            ]
        )
    )
    with pytest.raises(ConfigurationError, match="is not a device"):
        parse(wrong)


def test_a_letter_that_only_looks_ascii_in_lower_case_makes_no_device():
    kelvin = "\u212a"
    assert kelvin.lower() == "k"
    with pytest.raises(ConfigurationError, match="is not a device"):
        parse(f"{kelvin}ey")


def test_a_request_may_be_256_characters_long_and_no_longer():
    text = ",".join(f"a{index:030}" for index in range(8))
    assert len(text) == 255
    assert len(parse(text + "9")) == 8
    with pytest.raises(ConfigurationError, match="more than 256 characters"):
        parse(text + "99")


@given(text=st.text())
def test_any_text_is_read_or_refused_in_few_printable_words(text):
    message = ""
    try:
        parse(text)
    except ConfigurationError as error:
        message = str(error)
    assert len(message) < 2000
    assert message.replace("\n", "").isprintable()
    assert message.isascii()


@pytest.mark.parametrize("thing", [0, 1.5, True, b"cpu", ["cpu"], object()], ids=lambda thing: type(thing).__name__)
def test_what_is_no_string_is_refused_by_its_type(thing):
    with pytest.raises(ConfigurationError, match=rf"\Adevice is an? {type(thing).__name__}, not a string"):
        accelcore.select(thing)


HOSTILE = [
    "cuda:99",
    "cuda:128",
    "npu:-1",
    "cuda:",
    "cuda:01",
    "\uff43\uff55\uff44\uff41",
    "cpu\u212a",
    "cpu\n",
    "cpu:\u0660",
    "a" * 1_000_000,
    "a," * 500_000,
    "os",
    "../x",
    "/etc/passwd",
    "cuda:0;rm",
    "$(id)",
    "%s%n",
    "cpu,cpu",
    "cpu:0x0",
]


@pytest.mark.parametrize(
    ("source", "value"),
    [
        *(("device", value) for value in [*HOSTILE, " ", "cpu\x00", "\x00"]),
        *(("ACCEL_DEVICE", value) for value in HOSTILE),  # no environment variable can hold a NUL
    ],
    ids=lambda value: ascii(value[:12]),
)
def test_a_hostile_value_is_refused_fast_and_shortly_naming_its_source(monkeypatch, source, value):
    if source == "ACCEL_DEVICE":
        monkeypatch.setenv(source, value)
    with pytest.raises(AccelError):
        accelcore.select("unheard")  # what a refusal itself imports is there now
    modules = set(sys.modules)
    start = time.perf_counter()
    with pytest.raises(AccelError, match=rf"\A{source}=") as caught:
        accelcore.select(value if source == "device" else None)
    assert time.perf_counter() - start < 1
    assert len(str(caught.value)) < 2000
    assert caught.value.remedy
    ours = ("accelcore", "packaging")  # a probe of a build that does not fit the machine compares versions
    assert {name for name in set(sys.modules) - modules if not name.startswith(ours)} == set()


@pytest.mark.parametrize("value", ["trapmodule", "trapmodule:1", "cpu:9,trapmodule", "trapmodule,cpu:9"])
def test_a_module_is_never_imported_because_a_value_names_it(tmp_path, monkeypatch, value):
    (tmp_path / "trapmodule.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(AccelError, match="trapmodule"):
        accelcore.select(value)
    assert "trapmodule" not in sys.modules
