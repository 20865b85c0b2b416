"""Stand-ins for pyxis and Apptainer: each step gets a mount namespace with a /tmp of its own, as enroot gives it.

A step sees of the host's /tmp what it mounts, and nothing else. Entering needs root.
"""

from __future__ import annotations

import shutil
from pathlib import Path

ENTER = """\
#!/usr/bin/env bash
# enter.sh MOUNTS COMMAND...: run a command with a private /tmp and these folders of the host, with commas between.
set -eu
mounts=$1
shift
exec unshare --mount bash -c '
  mkdir -p /run/host-tmp && mount --bind /tmp /run/host-tmp && mount -t tmpfs private /tmp && chmod 1777 /tmp
  IFS=, read -ra folders <<<"$0"
  for folder in "${folders[@]}"; do
    folder=${folder%%:*}
    [[ $folder == /tmp/* ]] || continue
    mkdir -p "$folder" && mount --bind "/run/host-tmp/${folder#/tmp/}" "$folder"
  done
  umount /run/host-tmp
  cd "$PWD" && exec "$@"' "$mounts" "$@"
"""

SRUN = """\
#!/usr/bin/env bash
# srun with the options of pyxis; without them it is srun itself.
options=() mounts="" image=""
while (($#)); do
  case $1 in
  --container-mounts=*) mounts=${1#*=} ;;
  --container-image=*) image=${1#*=} ;;
  --container-*) ;;
  --) shift; break ;;
  --*) options+=("$1") ;;
  *) break ;;
  esac
  shift
done
[[ -z $image ]] || echo "$image" >>SEEN
exec SRUN "${options[@]}" -- ${image:+ENTER "$mounts"} "$@"
"""

APPTAINER = """\
#!/usr/bin/env bash
# apptainer exec [--nv] [--bind DIR]... --pwd DIR IMAGE COMMAND...
mounts=${APPTAINER_BIND:-}
shift
while [[ $1 == --* ]]; do
  case $1 in
  --bind) mounts+=",$2"; shift 2 ;;
  --pwd) shift 2 ;;
  *) shift ;;
  esac
done
echo "$1" >>SEEN
shift
exec ENTER "$mounts" "$@"
"""


def write_programs(folder: Path, seen: Path) -> None:
    """Write `srun` and `apptainer` into a folder for PATH; each step that enters a container adds a line to `seen`."""
    folder.mkdir()
    srun = shutil.which("srun")
    assert srun is not None
    enter = folder / "enter.sh"
    for name, text in (("enter.sh", ENTER), ("srun", SRUN), ("apptainer", APPTAINER)):
        path = folder / name
        path.write_text(
            text.replace("SEEN", str(seen)).replace("exec SRUN", f"exec {srun}").replace("ENTER", str(enter))
        )
        path.chmod(0o755)
