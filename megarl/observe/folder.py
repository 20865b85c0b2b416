"""The folder of a run: one run each."""

from __future__ import annotations

from pathlib import Path


def retire_earlier_run(folder: Path) -> Path | None:
    """Move a run of the same name out of the way, to the first free `<name>.N`; nothing of it is lost."""
    if not folder.exists():
        return None
    number = 1
    while (retired := folder.with_name(f"{folder.name}.{number}")).exists():
        number += 1
    folder.rename(retired)
    return retired
