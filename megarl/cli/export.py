"""`megarl export`: a model out of a run, as a folder for other tools."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from megarl.cli.byte_progress import count_bytes
from megarl.cli.display import make_console


class ExportDtype(StrEnum):
    BF16 = "bf16"
    FP32 = "fp32"


_DTYPES = {ExportDtype.BF16: "bfloat16", ExportDtype.FP32: "float32"}


def export(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="CKPT",
            help="A checkpoint, a run's folder (its newest whole checkpoint), or a Hugging Face folder.",
            show_default=False,
        ),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A folder that is not there yet.", show_default=False)],
    dtype: Annotated[ExportDtype | None, typer.Option(help="Of the weights; by default what they have.")] = None,
    is_loaded: Annotated[
        bool,
        typer.Option(
            "--load-check/--no-load-check",
            help="Load source and result with transformers and compare log-probabilities; needs memory for the model.",
        ),
    ] = True,
) -> None:
    """Write a model as a Hugging Face folder, verified against its source; on the CPU, in little memory."""
    from megarl.checkpoint.export import export_model, refuse_occupied
    from megarl.checkpoint.locate import find_model
    from megarl.cli.load_check import LoadCheck

    console = make_console()
    wanted = _DTYPES[dtype] if dtype is not None else None
    refuse_occupied(out)
    with count_bytes(console, "verifying") as counter:
        model = find_model(source, wants_master=dtype is ExportDtype.FP32, on_bytes=counter)
    for note in model.notes:
        console.print(note)
    check = LoadCheck(model, dtype=wanted) if is_loaded else None
    with count_bytes(console, "exporting") as counter:
        exported = export_model(model, out, dtype=wanted, on_bytes=counter, check=check)
    size = f"{exported.num_tensors} tensors, {exported.num_bytes / 1e9:.3f} GB in {exported.num_files} file(s)"
    cast = f", {exported.num_cast} cast to {wanted}" if exported.num_cast else ""
    console.print(f"{out}: {size}{cast}; names, shapes, dtypes and digests compared with {model.tensor_folder}")
    console.print(f"{out}: loaded with transformers: {check}" if check is not None else f"{out}: not loaded to compare")
