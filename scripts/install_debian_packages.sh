#!/usr/bin/env bash
# Installs what megarl or its tests use and pip does not have. Does nothing where all of it is there; else it needs
# root or sudo, and exits with 1 where it cannot install.
set -euo pipefail
PATH=$PATH:/usr/sbin:/sbin

packages=( # program:package
  bwrap:bubblewrap      # `reward: {kind: code_tests}` runs the model's code in it
  prometheus:prometheus # with promtool: the queries of dashboards and alert rules are tried on a real one
  chromium:chromium     # the run page is opened in it
  slurmctld:slurmctld slurmd:slurmd sbatch:slurm-client munged:munge # two nodes on one host, for the launch templates
  shellcheck:shellcheck # of the job scripts
  patch:patch           # patches/ are tried on the released packages
  fusermount3:fuse3     # a slow disk for the tests of saves
  ip:iproute2           # launch/ray/start_node.sh asks it for this machine's address
)

missing=()
for entry in "${packages[@]}"; do
  command -v "${entry%%:*}" >/dev/null || missing+=("${entry##*:}")
done
((${#missing[@]})) || exit 0

give_up() {
  echo "not installed: ${missing[*]} ($1)" >&2
  exit 1
}

command -v apt-get >/dev/null || give_up "there is no apt-get"
as_root=()
if ((EUID != 0)); then
  command -v sudo >/dev/null || give_up "it takes root or sudo"
  as_root=(sudo)
  # Nobody could type a password where there is no terminal.
  [[ -t 0 ]] || as_root=(sudo -n)
fi
log=$(mktemp)
trap 'rm -f "$log"' EXIT
run() { "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive "$@" >"$log" 2>&1; }

echo "installing Debian packages: ${missing[*]}"
options=(-q -y -o Acquire::Retries=1 -o Acquire::http::Timeout=30 -o Acquire::https::Timeout=30)
{ "${as_root[@]}" true 2>"$log" && run apt-get update "${options[@]}" \
  && run apt-get install "${options[@]}" --no-install-recommends "${missing[@]}"; } \
  || give_up "$(grep -m1 -E '^(E|Err|sudo):?' "$log" || tail -n1 "$log")"
