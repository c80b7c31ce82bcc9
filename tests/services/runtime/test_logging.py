"""Logs: one JSON event a line on stderr, from our code and from libraries, without passwords."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trimtab.logging import configure_logging, mask_passwords

ROOT = Path(__file__).parents[3]

PROGRAM = """
import logging, structlog
from trimtab.logging import configure_logging
configure_logging("demo", level="info", json={json})
log = structlog.get_logger("part")
log.debug("hidden")
log.info("connected to %s", "x", url="redis://user:hunter2@host:1/0", count=3)
structlog.contextvars.bind_contextvars(request_id="r-1")
logging.getLogger("library").warning("cannot reach redis://user:hunter2@host")
try:
    1 / 0
except ZeroDivisionError:
    log.exception("broken")
"""


def run(json_logs: str) -> str:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(json=json_logs)],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert ended.stdout == ""
    return ended.stderr


@pytest.mark.parametrize("setting", ["None", "True"])
def test_one_json_event_a_line_when_stderr_is_no_terminal(setting: str) -> None:
    text = run(setting)
    events = [json.loads(line) for line in text.splitlines()]
    assert [event["event"] for event in events] == [
        "connected to x",
        "cannot reach redis://user:***@host",
        "broken",
    ]
    assert {event["service"] for event in events} == {"demo"}
    assert [event["level"] for event in events] == ["info", "warning", "error"]
    assert [event["logger"] for event in events] == ["part", "library", "part"]
    assert events[0]["count"] == 3
    assert events[0]["url"] == "redis://user:***@host:1/0"
    assert events[1]["request_id"] == "r-1"
    assert "ZeroDivisionError" in events[2]["exception"]
    assert "hunter2" not in text


def test_columns_for_people() -> None:
    text = run("False")
    assert "connected to x" in text
    assert "hunter2" not in text
    assert "\x1b[" not in text, "no colours where there is no terminal"


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(ValueError, match="log level 'loud'"):
        configure_logging("demo", level="loud")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("redis://:pw@h", "redis://:***@h"),
        ("a redis://u:p/w@h b", "a redis://u:p/w@h b"),
        ("http://h:80/x@y", "http://h:80/x@y"),
        ("nothing", "nothing"),
    ],
)
def test_masking(text: str, expected: str) -> None:
    assert mask_passwords(text) == expected
