"""What torch was built with. The only module of the doctor that imports it."""

from __future__ import annotations

from collections.abc import Iterator

from megarl.tools.doctor.checks import Check, CheckStatus


def check_torch(*, has_gpu: bool) -> Iterator[Check]:
    try:
        import torch  # noqa: PLC0415
    except ImportError as error:
        yield Check(
            area="versions", name="torch", found="cannot be imported", verdict=CheckStatus.ERROR, remedy=str(error)
        )
        return
    cuda = torch.version.cuda
    if cuda is None:
        yield Check(
            area="versions",
            name="cuda",
            found="torch is a CPU build",
            verdict=CheckStatus.ERROR if has_gpu else CheckStatus.NOTE,
            remedy="install the CUDA build of torch" if has_gpu else "",
        )
        return
    works = torch.cuda.is_available()
    verdict = CheckStatus.OK if works else CheckStatus.ERROR if has_gpu else CheckStatus.NOTE
    remedy = "torch sees no GPU: driver and CUDA do not fit, or CUDA_VISIBLE_DEVICES hides them"
    yield Check(
        area="versions", name="cuda", found=cuda, verdict=verdict, remedy=remedy if verdict is CheckStatus.ERROR else ""
    )
    nccl = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    yield Check(area="versions", name="nccl", found=".".join(map(str, nccl)), verdict=CheckStatus.OK)
