#!/usr/bin/env bash
# What megarl or its tests use and pip does not have. Does nothing where all of it is there; needs root otherwise.
set -euo pipefail

packages=(
  bubblewrap            # `reward: {kind: code_tests}` runs the model's code in it
  prometheus            # with promtool: dashboards' queries and alert rules are tried on a real one
  chromium              # the run page is opened in it
  slurmctld slurmd slurm-client munge # a cluster of two nodes on one host, for the launch templates
  shellcheck            # of the job scripts
  patch                 # patches/ are tried on the released packages
  iproute2              # launch/ray/start_node.sh asks it for this machine's address
)

missing=()
for package in "${packages[@]}"; do
  dpkg-query --show --showformat='${db:Status-Status}' "$package" 2>/dev/null | grep -qx installed || missing+=("$package")
done
if ((${#missing[@]} == 0)); then
  exit 0
fi
echo "installing ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
apt-get update -q
apt-get install -q -y --no-install-recommends "${missing[@]}"
