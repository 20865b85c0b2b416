"""Limits that protect a reader: short functions, few imports, one direction. import-linter holds the layers."""

from __future__ import annotations

import pytest

from scripts import structure


def test_no_file_is_too_long_to_read() -> None:
    """From 400 lines on a file is looked at for a second reason to change (`python -m scripts.structure` counts)."""
    assert structure.long_files() == [], f"the limit is {structure.MAX_FILE_LINES} lines"


@pytest.mark.patient
def test_functions_are_short() -> None:
    assert structure.long_functions() == [], f"the limit is {structure.MAX_FUNCTION_LINES} lines"


@pytest.mark.patient
def test_a_module_imports_few_others() -> None:
    assert structure.crowded_modules() == {}, f"the limit is {structure.MAX_IMPORTS} modules of megarl"


def test_no_two_packages_import_each_other() -> None:
    assert structure.mutual_packages() == []


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert structure.circles() == []


def test_a_class_name_is_defined_once() -> None:
    assert structure.repeated_classes() == {}


@pytest.mark.patient
def test_docstrings_begin_with_a_subject_or_a_verb() -> None:
    assert list(structure.riddles()) == []
