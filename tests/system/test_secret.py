from __future__ import annotations

import copy
import logging
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.engine.client import EngineKeys
from megarl.observe.event_file import EVENTS_FILE
from megarl.observe.event_log import EventLog
from megarl.observe.observer import Observer
from megarl.observe.observing import logging_to
from megarl.reward.judge import read_key
from megarl.system.secret import Secret, masked

CANARY = "canary-0c57f1b2"


def test_a_secret_is_shown_to_who_asks_for_it() -> None:
    secret = Secret(CANARY)
    assert secret.reveal() == CANARY
    assert CANARY not in f"{secret} {secret!r} {[secret]} {vars} {copy.copy(secret)}"
    assert pickle.loads(pickle.dumps(secret)) == secret


def test_and_struck_out_of_texts() -> None:
    Secret(CANARY)
    assert masked(f"key={CANARY}&x=1") == "key=***&x=1"
    Secret("ab")
    assert masked("abba") == "abba"


def test_logs_and_events_do_not_have_it(tmp_path: Path) -> None:
    (tmp_path / "key").write_text(f"{CANARY}\n")
    key = read_key(tmp_path / "key")
    log = EventLog(tmp_path / EVENTS_FILE)
    with logging_to(tmp_path / "megarl.log"), Observer([log]) as observer:
        observer.warned(f"status 401 for {key.reveal()}")
        logging.getLogger("megarl.reward").warning("refused %s", key.reveal())
    log.close()
    for name in (EVENTS_FILE, "megarl.log"):
        text = (tmp_path / name).read_text()
        assert "***" in text
        assert CANARY not in text


@pytest.mark.patient
def test_a_process_that_is_sent_an_engines_keys_strikes_them_out() -> None:
    keys = EngineKeys.fresh()
    program = (
        "import pickle, sys; from megarl.system.secret import masked; "
        "keys = pickle.load(sys.stdin.buffer); print(masked(f'{keys.api} {keys.admin}'))"
    )
    done = subprocess.run([sys.executable, "-c", program], input=pickle.dumps(keys), capture_output=True, check=True)
    assert done.stdout.decode().strip() == "*** ***"
