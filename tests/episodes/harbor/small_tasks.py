"""Ten small tasks in Harbor's format, which need nothing but a shell and Python, with a solution each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import dedent

_TOML = """version = "1.0"

[metadata]
difficulty = "easy"

[agent]
timeout_sec = 120.0

[verifier]
timeout_sec = 60.0

[environment]
cpus = 1
memory_mb = 512
storage_mb = 64
"""
_PASS_OR_FAIL = "\nif [ $? -eq 0 ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt\n"


@dataclass(frozen=True, kw_only=True)
class SmallTask:
    instruction: str
    test: str
    """A command whose exit status is the grade, or, with `is_whole`, the whole test.sh."""
    solution: str
    is_whole: bool = False
    dockerfile: str = "FROM python:3.12-slim\nWORKDIR /app\n"
    files: Mapping[str, str] = field(default_factory=dict)
    tests: Mapping[str, str] = field(default_factory=dict)


TASKS: Mapping[str, SmallTask] = {
    "hello": SmallTask(
        instruction="Write `Hello, world!` into the file hello.txt.",
        test='[ "$(cat /app/hello.txt)" = "Hello, world!" ]',
        solution="echo 'Hello, world!' > hello.txt",
    ),
    "sum": SmallTask(
        instruction="Write the sum of the numbers of numbers.txt into sum.txt.",
        dockerfile="FROM python:3.12-slim\nWORKDIR /app\nCOPY numbers.txt .\n",
        files={"numbers.txt": "3\n4\n35\n"},
        test='[ "$(cat /app/sum.txt)" = 42 ]',
        solution="awk '{s += $1} END {print s}' numbers.txt > sum.txt",
    ),
    "fix-bug": SmallTask(
        instruction="mean.py computes a wrong mean of an even number of values. Repair it.",
        dockerfile="FROM python:3.12-slim\nWORKDIR /app\nCOPY . /app/\n",
        files={"mean.py": "def mean(values):\n    return sum(values) // len(values)\n"},
        tests={
            "check.py": "import sys\nsys.path.insert(0, '/app')\nfrom mean import mean\nassert mean([1, 2]) == 1.5\n"
        },
        test="python3 /tests/check.py",
        solution="sed -i 's://:/:' mean.py",
    ),
    "built": SmallTask(
        instruction="Print the version that the build has left in /opt, and write it into /app/version.",
        dockerfile=dedent("""\
            FROM python:3.12-slim AS base
            ARG NUMBER=7
            ENV RELEASE=3.$NUMBER
            # a comment
            RUN mkdir -p /opt/made && \\
                echo "$RELEASE" > /opt/made/version
            WORKDIR /app
            CMD ["sleep", "1"]
            """),
        test='[ "$(cat /app/version)" = 3.7 ] && [ "$RELEASE" = 3.7 ]',
        solution="cat /opt/made/version | tee version",
    ),
    "rename": SmallTask(
        instruction="Rename every .txt file to .md.",
        dockerfile="FROM python:3.12-slim\nWORKDIR /app\nCOPY *.txt notes/\n",
        files={"a.txt": "a\n", "b.txt": "b\n"},
        test='[ "$(ls /app/notes | tr "\\n" " ")" = "a.md b.md " ]',
        solution='for each in notes/*.txt; do mv "$each" "${each%.txt}.md"; done',
    ),
    "delete": SmallTask(
        instruction="Remove the folder junk, which the image has, and make an empty one in its place.",
        dockerfile="FROM python:3.12-slim\nWORKDIR /app\nCOPY junk junk\n",
        files={"junk/old": "old\n"},
        test='[ -d /app/junk ] && [ -z "$(ls -A /app/junk)" ]',
        solution="rm -r junk && mkdir junk",
    ),
    "server": SmallTask(
        instruction="Serve the folder /app/www on port 8123 and leave the server running.",
        dockerfile="FROM python:3.12-slim\nWORKDIR /app\nRUN mkdir www && echo up > www/state\n",
        test=(
            "python3 -c 'import urllib.request as r; "
            'assert r.urlopen("http://127.0.0.1:8123/state", timeout=30).read() == b"up\\n"\''
        ),
        solution=(
            "cd www && (python3 -m http.server 8123 --bind 127.0.0.1 >/dev/null 2>&1 &)\n"
            "until python3 -c 'import socket; socket.create_connection((\"127.0.0.1\", 8123), 1)' 2>/dev/null; "
            "do :; done"
        ),
    ),
    "json": SmallTask(
        instruction='Write {"ok": true} as out.json; the parts are graded apart.',
        is_whole=True,
        test=dedent("""\
            cd /app
            exists=$([ -f out.json ] && echo 1 || echo 0)
            right=$(python3 -c 'import json; print(int(json.load(open("out.json")) == {"ok": True}))' || echo 0)
            python3 -c "import json; print(json.dumps({'reward': ($exists + $right) / 2, 'exists': $exists}))" \\
              > /logs/verifier/reward.json
            """),
        solution="echo '{\"ok\": true}' > out.json",
    ),
    "permissions": SmallTask(
        instruction="Make run.sh executable and run it.",
        dockerfile='FROM python:3.12-slim\nWORKDIR "/app"\nADD ["run.sh", "/app/run.sh"]\n',
        files={"run.sh": "#!/bin/sh\necho done > /app/result\n"},
        test="[ -x /app/run.sh ] && [ -f /app/result ]",
        solution="chmod +x run.sh && ./run.sh",
    ),
    "nested/search": SmallTask(
        instruction="Write the name of the file that contains the word needle into found.txt.",
        dockerfile="FROM python:3.12-slim\nWORKDIR /app\nCOPY hay /app/hay/\n",
        files={"hay/1": "straw\n", "hay/2": "needle\n", "hay/deep/3": "straw\n"},
        test='[ "$(basename "$(cat /app/found.txt)")" = 2 ]',
        solution="grep -rl needle hay > found.txt",
    ),
}


def write_tasks(folder: Path) -> Path:
    """Write all tasks below a folder and return it."""
    for name, task in TASKS.items():
        root = folder / name
        whole = f"#!/bin/bash\n{task.test}" if task.is_whole else f"#!/bin/bash\n{task.test}{_PASS_OR_FAIL}"
        texts = {
            "instruction.md": f"{task.instruction}\n",
            "task.toml": _TOML,
            "environment/Dockerfile": task.dockerfile,
            "tests/test.sh": whole,
            "solution/solve.sh": task.solution,
            **{f"environment/{path}": text for path, text in task.files.items()},
            **{f"tests/{path}": text for path, text in task.tests.items()},
        }
        for path, text in texts.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(text)
    return folder
