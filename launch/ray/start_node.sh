#!/usr/bin/env bash
# One node of a Ray cluster on plain machines, for megarl. Run it on every machine, the head first; Ctrl-C stops it.
#
#   head:    RAY_AUTH_TOKEN_PATH=~/.megarl/ray-token  start_node.sh head    ADDRESS[:PORT] [ray start options]
#   others:  RAY_AUTH_TOKEN_PATH=~/.megarl/ray-token  start_node.sh worker  ADDRESS[:PORT] [ray start options]
#
# ADDRESS is the head's, on the network the machines share. The head makes the token if there is none; copy the file to
# the other machines (scp), readable by you alone. Then, on the head: megarl train RECIPE --set run.ray_address=ADDRESS:PORT
set -euo pipefail

fail() {
  echo "start_node.sh: $*" >&2
  exit 2
}

(($# >= 2)) || fail "needs head or worker, and the head's address; its first lines say how"
role=$1
address=${2%:*}
port=6379
[[ $2 == *:* ]] && port=${2##*:}
shift 2

: "${RAY_AUTH_TOKEN_PATH:=$HOME/.megarl/ray-token}"
if [[ ! -s $RAY_AUTH_TOKEN_PATH ]]; then
  [[ $role == head ]] || fail "$RAY_AUTH_TOKEN_PATH is missing: copy the head's file there"
  mkdir -p "$(dirname "$RAY_AUTH_TOKEN_PATH")"
  (umask 077 && head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n' >"$RAY_AUTH_TOKEN_PATH")
fi
[[ $(stat -c %a "$RAY_AUTH_TOKEN_PATH") == 600 ]] || fail "$RAY_AUTH_TOKEN_PATH can be read by others: chmod 600 it"
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH RAY_USAGE_STATS_ENABLED=0
ulimit -n "$(ulimit -Hn)"

case $role in
head)
  exec ray start --head --block --node-ip-address="$address" --port="$port" --include-dashboard=false "$@"
  ;;
worker)
  # A worker that comes before the head would give up for good.
  until (exec 3<>"/dev/tcp/$address/$port") 2>/dev/null; do sleep 1; done
  # The address from which this machine reaches the head is the one the head reaches it at.
  own=$(ip -4 route get "$address" | grep -oE 'src [0-9.]+' | cut -d' ' -f2)
  exec ray start --block --address="$address:$port" --node-ip-address="$own" "$@"
  ;;
*)
  fail "$role is neither head nor worker"
  ;;
esac
