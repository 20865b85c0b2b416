"""Commands about families of models: `megarl family list`, `megarl family probe`."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from megarl.config.model import is_known
from megarl.errors import WeightSyncError
from megarl.families import FAMILIES
from megarl.families.fields import refused

family_app = typer.Typer(no_args_is_help=True, help="The families of models, and whether a description is right.")


@family_app.command("list")
def list_families() -> None:
    """List the families, with the architecture of each and its public models."""
    for family in FAMILIES:
        print(f"{family.name:<12} {family.architecture:<24} {', '.join(family.models)}")


@family_app.command()
def probe(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A model in Hugging Face format.", exists=True)],
    draft: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write a first description there, even of a known family. An unknown one's is MODEL_TYPE.py.",
        ),
    ] = None,
) -> None:
    """Compare the description of a model's family with its files, with transformers and with SGLang; or write one.

    The names and shapes of the tensors are compared with those in the files, and with those that transformers saves. A
    tiny model of the family, each element a number of its own, is then loaded by SGLang on this machine's CPU, whole
    and divided, and every element must be where the description says.

    Of a family that is not known a first description is written from what was loaded. What it could not decide is in
    it as UNDECIDED.

    Exits with 0 where all are equal or a description was written, with 76 where one is not equal.
    """
    from megarl.tools.family_probe.probe import probe as probe_family

    with tempfile.TemporaryDirectory(prefix="megarl-probe-") as work:
        if draft is not None or not is_known(folder):
            _write_draft(folder, draft, Path(work))
            return
        is_equal = True
        for finding in probe_family(folder, work=Path(work)):
            is_equal &= finding.is_equal
            print(f"{finding.what:<18} {'equal' if finding.is_equal else 'DIFFERS'}: {finding.detail}", flush=True)
    if not is_equal:
        raise typer.Exit(WeightSyncError.exit_code)


def _write_draft(folder: Path, file: Path | None, work: Path) -> None:
    from megarl.tools.family_probe.evidence import draft_family

    path = Path(f"{json.loads((folder / 'config.json').read_text())['model_type']}.py") if file is None else file
    if path.exists():
        raise refused(f"{path} exists; name another file with --draft")
    made = draft_family(folder, work=work)
    path.write_text(made.source)
    print(f"{path}: {made.num_described} of {made.num_parameters} parameters of SGLang's layers, every element")
    for each in made.undecided:
        print(f"undecided: {each}")
