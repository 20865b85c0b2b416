"""Commands about families of models: `megarl family list`, `megarl family probe`."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from megarl.errors import WeightSyncError
from megarl.families import FAMILIES

family_app = typer.Typer(no_args_is_help=True, help="The families of models, and whether a description is right.")


@family_app.command("list")
def list_families() -> None:
    """List the families, with the architecture of each and its public models."""
    for family in FAMILIES:
        print(f"{family.name:<12} {family.architecture:<24} {', '.join(family.models)}")


@family_app.command()
def probe(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A model in Hugging Face format.", exists=True)],
) -> None:
    """Compare the description of a model's family with its files, with transformers and with SGLang.

    The names and shapes of the tensors are compared with those in the files, and with those that transformers saves. A
    tiny model of the family, each element a number of its own, is then loaded by SGLang on this machine's CPU, whole
    and divided, and every element must be where the description says.

    Exits with 0 where all are equal, with 76 where one is not.
    """
    from megarl.tools.family_probe import probe as probe_family

    is_equal = True
    with tempfile.TemporaryDirectory(prefix="megarl-probe-") as work:
        for finding in probe_family(folder, work=Path(work)):
            is_equal &= finding.is_equal
            print(f"{finding.what:<18} {'equal' if finding.is_equal else 'DIFFERS'}: {finding.detail}", flush=True)
    if not is_equal:
        raise typer.Exit(WeightSyncError.exit_code)
