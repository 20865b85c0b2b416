from __future__ import annotations

from io import StringIO
from pathlib import Path

from rich.console import Console

from megarl.cli.train import print_report
from megarl.observe.report import ReportRow, RunReport


def test_the_table_has_every_row_and_the_picture_its_path() -> None:
    out = StringIO()
    rows = (
        ReportRow(name="reward", first=0.25, last=0.5, best=0.75, best_step=12),
        ReportRow(name="entropy", first=1.5, last=2e-5, best=None, best_step=None),
        ReportRow(name="tokens/s", first=1200.4, last=1500, best=1500, best_step=3),
    )
    print_report(RunReport(rows=rows, curves=Path("runs/sample/curves.png")), Console(file=out, width=100))
    header, *lines = [line.strip("┃│ ").split() for line in out.getvalue().splitlines() if line[0] in "┃│"]
    assert [word for word in header if word != "┃"] == ["first", "last", "best", "best", "at", "step"]
    assert [[word for word in line if word != "│"] for line in lines] == [
        ["reward", "0.250", "0.500", "0.750", "12"],
        ["entropy", "1.500", "2.0e-05"],
        ["tokens/s", "1,200", "1,500", "1,500", "3"],
    ]
    assert out.getvalue().splitlines()[-1] == "curves: runs/sample/curves.png"
