#!/usr/bin/env bash
# What megarl uses and pip does not have: bubblewrap, in which `reward: {kind: code_tests}` runs the model's code.
# Does nothing where it is there; needs root otherwise.
set -euo pipefail

if command -v bwrap >/dev/null; then
  exit 0
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -q
apt-get install -q -y --no-install-recommends bubblewrap
