"""Each rule on the examples of its own file, which are those of the documentation."""

from __future__ import annotations

import textwrap

import pytest
from accelcore_lint.lint import check
from accelcore_lint.rules import RULES


def codes(source):
    return [finding.code for finding in check(textwrap.dedent(source))]


FOUND = [(rule.code, source) for rule in RULES.values() for source in rule.found]
CLEAN = [(rule.code, source) for rule in RULES.values() for source in rule.clean]


@pytest.mark.parametrize(("code", "source"), FOUND, ids=[code for code, _ in FOUND])
def test_a_rule_finds_its_examples(code, source):
    assert code in codes(source)


@pytest.mark.parametrize(("code", "source"), CLEAN, ids=[code for code, _ in CLEAN])
def test_a_rule_leaves_its_counterexamples(code, source):
    assert code not in codes(source)


@pytest.mark.parametrize("rule", RULES.values(), ids=lambda rule: rule.code)
def test_a_rule_has_words_and_examples_of_both_kinds(rule):
    assert rule.found
    assert rule.clean
    assert rule.about.endswith(".")
    assert rule.code.startswith("ACC")
    assert len(rule.code) == 6
