"""Whatever bytes a manifest, an event, a recipe or a data set has: an error of megarl or an answer, within bounds."""

from __future__ import annotations

import hashlib
import io
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from pydantic_core import to_json

from megarl.checkpoint.manifest import MANIFEST_FILE, check_sizes, read_header, read_manifest, verify
from megarl.cli.lines import describe, numbers_text
from megarl.config.checks.recipe import check_recipe
from megarl.config.document import override, read_document
from megarl.config.load import validated
from megarl.config.recipe import DataConfig
from megarl.data.rows import advise_template, read_rows
from megarl.errors import MegarlError
from megarl.observe.event_file import EventTail
from megarl.observe.event_log import EventLog
from megarl.observe.history import fold_history
from megarl.observe.progress import Progress, advance
from tests.checkpoint.samples import write_checkpoint
from tests.data.parquet_rows import make_row
from tests.observe.samples import one_of_each, records
from tests.repository import ROOT

MAX_CPU_S = 5.0
"""One parse; far more than any takes, on a machine that is five times slower too."""
MAX_KIB = 512 << 10
"""By which one parse may raise the most that this process ever held."""
FUZZ = settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)

TEXTS = st.text(max_size=20) | st.sampled_from(
    ["", "\x00", "\x1b[2J", "\ud800", "\u202e", "../../x", "/etc/passwd", "a" * 5000, "{}", "1e999", "nan", "__class__"]
)
NUMBERS = st.sampled_from([0, -1, 1 << 63, -(1 << 70), 10**400, 10**4000, 1e308, -0.0]) | st.integers() | st.floats()
HOSTILE = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=8,
)


@contextmanager
def no_exception_but_ours() -> Iterator[None]:
    began, held = time.process_time(), getrusage(RUSAGE_SELF).ru_maxrss
    try:
        yield
    except MegarlError as error:
        str(error).encode(errors="surrogatepass")
    assert time.process_time() - began < MAX_CPU_S
    assert getrusage(RUSAGE_SELF).ru_maxrss - held < MAX_KIB


@st.composite
def damaged(draw: st.DrawFn, whole: bytes) -> bytes:
    """Draw the bytes with some of them changed, left out, repeated or put in."""
    text = bytearray(whole)
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, max(len(text) - 1, 0)))
        match draw(st.sampled_from(["flip", "cut", "drop", "repeat", "insert"])):
            case "flip" if text:
                text[place] ^= 1 << draw(st.integers(0, 7))
            case "cut":
                del text[place:]
            case "drop":
                del text[place : place + draw(st.integers(1, 64))]
            case "repeat":
                text[place:place] = text[place : place + draw(st.integers(1, 64))] * draw(st.integers(1, 50))
            case _:
                text[place:place] = draw(st.binary(max_size=16) | st.sampled_from([b"[" * 100_000, b"9" * 5000]))
    return bytes(text)


@st.composite
def replaced(draw: st.DrawFn, tree: Any) -> Any:
    """Draw the tree with a value somewhere in it replaced, removed or added."""
    if isinstance(tree, dict) and tree and draw(st.integers(0, 9)):
        key = draw(st.sampled_from(sorted(tree)))
        rest = {name: value for name, value in tree.items() if name != key}
        match draw(st.integers(0, 9)):
            case 0:
                return rest
            case 1:
                return {**tree, draw(TEXTS): draw(HOSTILE)}
            case _:
                return {**tree, key: draw(replaced(tree[key]))}
    if isinstance(tree, list) and tree and draw(st.booleans()):
        place = draw(st.integers(0, len(tree) - 1))
        return [*tree[:place], draw(replaced(tree[place])), *tree[place + 1 :]]
    return draw(HOSTILE)


def as_json(tree: Any) -> bytes:
    """Render what JSON cannot have as well: NaN, halves of characters, numbers of any length."""
    if isinstance(tree, dict):
        return b"{" + b",".join(as_json(str(key)) + b":" + as_json(each) for key, each in tree.items()) + b"}"
    if isinstance(tree, list):
        return b"[" + b",".join(map(as_json, tree)) + b"]"
    if isinstance(tree, int) and abs(tree) > 1 << 64 and not isinstance(tree, bool):
        return b"-" * (tree < 0) + b"9" * (tree.bit_length() // 2)  # longer than Python reads
    return json.dumps(tree).encode()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("run"), step=3)


def look_at(folder: Path, manifest: bytes) -> None:
    """Look at the checkpoint as it is with another manifest."""
    path = folder / MANIFEST_FILE
    whole = path.read_bytes()
    try:
        path.write_bytes(manifest)
        for look in (read_manifest, check_sizes, verify, partial(verify, wants_weights=False)):
            with no_exception_but_ours():
                look(folder)
    finally:
        path.write_bytes(whole)


@pytest.mark.patient
@FUZZ
@given(data=st.data())
def test_manifests(checkpoint: Path, data: st.DataObject) -> None:
    look_at(checkpoint, data.draw(damaged((checkpoint / MANIFEST_FILE).read_bytes())))


def with_digest(fields: Any) -> bytes:
    """Someone who can write the store can write a digest too."""
    try:
        if isinstance(fields, dict):
            body = json.dumps(fields, indent=1, sort_keys=True).encode()
            fields = {**dict(sorted(fields.items())), "sha256": hashlib.sha256(body).hexdigest()}
        return json.dumps(fields, indent=1).encode() + b"\n"
    except (ValueError, TypeError):
        return as_json(fields)


def fields_of(checkpoint: Path) -> dict[str, Any]:
    return {key: each for key, each in json.loads((checkpoint / MANIFEST_FILE).read_bytes()).items() if key != "sha256"}


@pytest.mark.patient
@FUZZ
@given(data=st.data())
def test_manifests_whose_digest_is_right(checkpoint: Path, data: st.DataObject) -> None:
    look_at(checkpoint, with_digest(data.draw(replaced(fields_of(checkpoint)))))


@pytest.mark.parametrize("kind", ["nowhere", "no name", "sizes", "long number"])
def test_manifests_that_lie(checkpoint: Path, kind: str) -> None:
    fields = fields_of(checkpoint)
    name = next(name for name, file in fields["files"].items() if file["tensors"])
    file = fields["files"][name]
    lies: dict[str, Any] = {
        "nowhere": {"files": {"a\0b": file}},
        "no name": {"files": {"": file}},
        "sizes": {"files": {name: {**file, "tensors": [{**each, "num_bytes": 10**9} for each in file["tensors"]]}}},
        "long number": {"recipe": {"steps": 10**4000}},
    }
    look_at(checkpoint, with_digest({**fields, **lies[kind]}).replace(b"0" * 4000, b"0" * 6000))


@FUZZ
@given(data=st.data())
def test_headers_of_weights(checkpoint: Path, tmp_path: Path, data: st.DataObject) -> None:
    source = next(checkpoint.rglob("*.safetensors"))
    path = tmp_path / "x.safetensors"
    path.write_bytes(data.draw(damaged(source.read_bytes()[:4096])))
    with no_exception_but_ours():
        read_header(path)


@pytest.mark.patient
@FUZZ
@given(data=st.data())
def test_events(tmp_path: Path, data: st.DataObject) -> None:
    lines = [to_json(record, inf_nan_mode="strings") for record in records(one_of_each())]
    place = data.draw(st.integers(0, len(lines) - 1))
    line = data.draw(st.one_of(damaged(lines[place]), replaced(json.loads(lines[place])).map(as_json)))
    path = tmp_path / "events.jsonl"
    path.write_bytes(b"\n".join([*lines[:place], line.replace(b"\n", b" "), *lines[place + 1 :]]) + b"\n")
    with no_exception_but_ours():
        tail = EventTail(path)
        found = tail.read()
        assert len(found) >= len(lines) - 1
        progress = Progress()
        for record in found:
            progress = advance(progress, record)
            describe(record)
            numbers_text(progress)
        fold_history(found)
        log = EventLog(path)
        log.record(found[-1])
        log.close()


NAMES = ("quickstart.yaml", "dapo_32b.yaml", "quickstart_tools.yaml")
RECIPES = [(ROOT / "recipes" / name).read_bytes() for name in NAMES]


def load(raw: bytes, folder: Path) -> None:
    path = folder / "recipe.yaml"
    path.write_bytes(raw)
    with no_exception_but_ours():
        recipe = validated(read_document(path), source="recipe").recipe
        check_recipe(recipe)


@pytest.mark.patient
@FUZZ
@given(data=st.data())
@example(data=None)
def test_recipes(tmp_path: Path, data: st.DataObject | None) -> None:
    if data is None:
        for value in ("!!bool maybe", "!!timestamp soon", "!!int one", "!!float one", "!!binary '='", "!!set {a}"):
            load(b"run: {steps: " + value.encode() + b"}\n", tmp_path)
        load(b"extends: " + b"a" * 300 + b"\n", tmp_path)
        return
    raw = data.draw(st.sampled_from(RECIPES))
    tree = replaced(yaml.safe_load(raw))
    load(data.draw(st.one_of(damaged(raw), tree.map(as_json), st.binary(max_size=200))), tmp_path)


@pytest.mark.patient
@FUZZ
@given(assignment=st.text(max_size=60) | st.from_regex(r"[a-z.]{1,12}=[^\n]{0,30}", fullmatch=True))
@example(assignment="run.steps=!!bool maybe")
@example(assignment="run.name=" + "a" * 300)
def test_overrides(assignment: str) -> None:
    with no_exception_but_ours():
        document = override(read_document(ROOT / "recipes" / "quickstart.yaml"), assignment)
        validated(document, source="recipe")


def table_bytes(rows: list[dict[str, object]]) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), buffer)
    return buffer.getvalue()


PARQUET = table_bytes([make_row(), make_row("2+2=")])


def read_all(path: Path) -> None:
    config = DataConfig(train=(path,))
    for act in (
        lambda: read_rows([path], config, as_demonstrations=False),
        lambda: read_rows([path], config, as_demonstrations=True),
        lambda: list(advise_template(config)),
    ):
        with no_exception_but_ours():
            act()


@pytest.mark.patient
@FUZZ
@given(raw=damaged(PARQUET) | st.binary(max_size=200))
def test_parquet_files(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "rows.parquet"
    path.write_bytes(raw)
    read_all(path)


@pytest.mark.patient
@FUZZ
@given(row=replaced(make_row([{"role": "user", "content": "1+1="}])))
def test_rows_of_any_type(tmp_path: Path, row: Any) -> None:
    path = tmp_path / "rows.parquet"
    try:
        pq.write_table(pa.Table.from_pylist([row, row]), path)
    except (pa.ArrowException, ValueError, TypeError, AttributeError, OverflowError):
        return  # no file can have it
    read_all(path)
