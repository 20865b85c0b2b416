# Everything above is rendered from the recipe; the text below is the same for every job.
#
# One step per node runs Ray, one step on the first node runs megarl; containers share the node's folder of Ray. Slurm's warning before the time limit becomes
# SIGUSR1 for megarl alone: it saves and exits with 75, and the job is queued again and resumes.
set -euo pipefail

main() {
  job_folder="$log_root/$SLURM_JOB_ID"
  logs="$job_folder/attempt_${SLURM_RESTART_COUNT:-0}"
  pid_file="$logs/train.pid"
  began=$(date +%s)
  is_asked=0
  is_told=0
  train_step=""
  ray_steps=()
  broken=()
  # Ray makes its own folders writable for all: they are inside one that only this user enters, on every node.
  ray_folder="/tmp/megarl-$SLURM_JOB_ID"
  # shellcheck disable=SC2016 # expanded on the node
  private_folder='mkdir -p -m 700 "$0" && [[ -O $0 && ! -L $0 ]] || { echo "$0 belongs to another user"; exit 5; }; '
  mkdir -p "$logs/prepared"
  # Every request and every Ray worker opens files; RDMA locks memory.
  ulimit -n "$(ulimit -Hn)" -l "$(ulimit -Hl)"
  mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
  load_environment
  trap 'ask_to_leave' USR1
  trap 'stop_ray; forget_token' EXIT

  make_token
  prepare_nodes
  start_ray
  wait_for_nodes
  code=0
  if ((!is_asked)); then
    train || code=$?
  else
    code=75
  fi
  say "megarl ended with $code"
  ((code == 0 || code == 75)) || note_broken
  stop_ray
  clean_up "$code"
  leave "$code"
}

say() {
  echo "$(date -u +%FT%TZ) $*"
}

# What the options of `megarl launch slurm` say about the environment; every step inherits it.
load_environment() {
  # Files of a site are written for shells without these.
  set +eu
  if ((${#modules[@]})); then
    # shellcheck disable=SC1091 # of the site
    type module &>/dev/null || source /etc/profile
    module load "${modules[@]}" || leave_unstarted "module load ${modules[*]} failed"
  fi
  # shellcheck disable=SC1090 # of the user
  [[ -z $prolog ]] || source "$prolog" || leave_unstarted "$prolog failed"
  set -eu
  ((!${#environment[@]})) || export "${environment[@]}"
  # Last, so that no module is found first.
  [[ -z $programs ]] || export PATH="$programs:$PATH"
}

leave_unstarted() {
  say "$1"
  exit 2
}

# Make Ray's folder on every node, which all containers of the node see; pyxis unpacks the image once for all steps.
prepare_nodes() {
  # shellcheck disable=SC2016 # expanded on the node
  srun --overlap --ntasks-per-node=1 --output="$logs/prepare.log" --open-mode=append \
    bash -c "$private_folder"'touch "$1/$SLURMD_NODENAME"' "$ray_folder" "$logs/prepared" ||
    fail_to_start "not all nodes can be used: read $logs/prepare.log"
  case $container in
  pyxis)
    srun_options+=("--container-name=megarl" "--container-mounts=$mounts,$ray_folder:$ray_folder")
    say "unpacking the image on every node"
    srun --overlap --ntasks-per-node=1 --output="$logs/prepare.log" --open-mode=append "${srun_options[@]}" -- true ||
      fail_to_start "the image cannot be used: read $logs/prepare.log"
    ;;
  apptainer) export APPTAINER_BIND="${APPTAINER_BIND:+$APPTAINER_BIND,}$ray_folder" ;;
  esac
}

# Run a command on one node, in the container if there is one, with its output in a file of its own.
on_node() {
  local node=$1 log=$2
  shift 2
  # All cores and no binding: where a site binds tasks, Ray and everything below it would share one core.
  srun --overlap --nodes=1 --ntasks=1 --cpus-per-task="$SLURM_CPUS_ON_NODE" --cpu-bind=none \
    --nodelist="$node" --unbuffered --output="$log" --open-mode=append \
    "${srun_options[@]}" -- "${inside[@]}" "$@"
}

# The token is in a file that only the user can read, never in an argument.
make_token() {
  token_file="$job_folder/token"
  rm -f "$token_file"
  (umask 077 && head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n' >"$token_file")
  export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH="$token_file" RAY_USAGE_STATS_ENABLED=0
}

# shellcheck disable=SC2317 # called by a trap
forget_token() {
  rm -f "$token_file"
}

# Print the address by which Slurm reaches a node.
address_of() {
  local given
  given=$(scontrol show node "$1" --oneliner | grep -oE '\bNodeAddr=[^ ]+' | cut -d= -f2)
  getent ahostsv4 "$given" | awk 'NR == 1 {print $1}'
}

start_ray() {
  local address node
  address=$(address_of "${nodes[0]}")
  # This script runs on the first node.
  port=$(python3 -c 'import socket, sys; print(socket.create_server((sys.argv[1], 0)).getsockname()[1])' "$address")
  head="$address:$port"
  say "Ray at $head, nodes ${nodes[*]}, logs in $logs"
  start_node "${nodes[0]}" "$address" &
  ray_steps+=("$!")
  wait_for_head
  for node in "${nodes[@]:1}"; do
    start_node "$node" "$(address_of "$node")" &
    ray_steps+=("$!")
  done
}

# A worker that starts before the head fails for good.
wait_for_head() {
  local deadline=$((SECONDS + ready_timeout_s))
  until (exec 3<>"/dev/tcp/${head%:*}/$port") 2>/dev/null; do
    if ((SECONDS > deadline)) || ! kill -0 "${ray_steps[0]}" 2>/dev/null; then
      fail_to_start "Ray does not start on ${nodes[0]}: read $logs/ray_${nodes[0]}.log"
    fi
    sleep 0.2
  done
}

# Ray counts every core of the machine; the job may have fewer, so Ray gets Slurm's number for that node.
start_node() {
  local node=$1 address=$2 place=(--address="$head")
  if [[ $node == "${nodes[0]}" ]]; then
    place=(--head --port="$port" --include-dashboard=false --temp-dir="$ray_folder/ray")
  fi
  # shellcheck disable=SC2016 # expanded on the node
  on_node "$node" "$logs/ray_$node.log" bash -c 'exec ray start --num-cpus="$SLURM_CPUS_ON_NODE" "$@"' ray \
    --block --node-ip-address="$address" "${devices[@]}" "${place[@]}"
}

wait_for_nodes() {
  export RAY_ADDRESS="$head"
  on_node "${nodes[0]}" "$logs/ready.log" \
    python3 -m megarl.tools.launch.ready --nodes "${#nodes[@]}" --timeout-s "$ready_timeout_s" &
  local ready_step=$! code=0
  # Also ends when Ray ends on a node.
  wait -n "$ready_step" "${ray_steps[@]}" || code=$?
  if kill -0 "$ready_step" 2>/dev/null; then
    pkill -TERM -P "$ready_step" || true
    ((is_asked)) || fail_to_start "Ray ended on a node: read $logs/ray_*.log"
  elif ((code)); then
    fail_to_start "not all nodes joined within $ready_timeout_s s: $(tail -n 1 "$logs/ready.log")"
  fi
}

fail_to_start() {
  say "$1"
  note_broken
  stop_ray
  clean_up 5
  count_failure 5
}

train() {
  # shellcheck disable=SC2016 # expanded on the node
  on_node "${nodes[0]}" "$logs/${train_words[0]}.log" bash -c 'echo $$ >"$0"; exec megarl "$@"' "$pid_file" "${train_words[@]}" &
  train_step=$!
  local code
  while true; do
    code=0
    wait "$train_step" || code=$?
    pass_on_warning
    # A signal that this script handles ends `wait`, not what it waits for.
    if ((code <= 128)) || ! kill -0 "$train_step" 2>/dev/null; then
      return "$code"
    fi
  done
}

# Slurm's warning. It goes to megarl alone: a signal to its step would reach Ray's processes too.
# shellcheck disable=SC2317 # called by a trap
ask_to_leave() {
  is_asked=1
  is_told=0
  say "asked to save and exit"
  [[ ! -s $pid_file ]] || pass_on_warning
}

# Tell megarl, once it has a process: the warning may come while its container is still unpacked.
pass_on_warning() {
  ((is_asked && !is_told)) || return 0
  until [[ -s $pid_file ]]; do
    kill -0 "$train_step" 2>/dev/null || return 0
    sleep 0.2
  done
  is_told=1
  kill -USR1 "$(<"$pid_file")" || true
}

# Remember the nodes that were not ready at the beginning, and those where Ray has ended by itself.
note_broken() {
  local index
  for index in "${!nodes[@]}"; do
    if [[ ! -e $logs/prepared/${nodes[index]} ]] ||
      { ((index < ${#ray_steps[@]})) && ! kill -0 "${ray_steps[index]}" 2>/dev/null; }; then
      broken+=("${nodes[index]}")
    fi
  done
}

# Add this attempt's broken nodes, and those that megarl has excluded, to the job's; print all, with commas between.
bad_nodes() {
  local node
  for node in "${nodes[@]}"; do
    if [[ " ${broken[*]} " == *" $node "* ]] || grep -qsxF "$(address_of "$node")" "$excluded_file"; then
      echo "$node" >>"$job_folder/bad_nodes"
    fi
  done
  [[ ! -s $job_folder/bad_nodes ]] || sort -u "$job_folder/bad_nodes" | paste -sd,
}

stop_ray() {
  ((${#ray_steps[@]})) || return 0
  local step
  for step in "${ray_steps[@]}"; do
    # The step's srun is the child of a subshell; it passes SIGTERM on to what it started.
    pkill -TERM -P "$step" 2>/dev/null || true
  done
  wait "${ray_steps[@]}" 2>/dev/null || true
  ray_steps=()
}

# Remove Ray's files on every node; those of a lost node stay. After a failure the end of each log is copied before.
clean_up() {
  local keeps=0
  (($1 == 0 || $1 == 75)) || keeps=1
  # shellcheck disable=SC2016 # expanded on the node
  timeout 300 srun --overlap --ntasks-per-node=1 bash -c '
    cd "$0/ray/session_latest/logs" 2>/dev/null && (($2)) && find . -type f -size +0 | while IFS= read -r file; do
      mkdir -p "$1/ray_$SLURMD_NODENAME/$(dirname "$file")"
      tail -c 1048576 "$file" >"$1/ray_$SLURMD_NODENAME/$file"
    done
    rm -rf "$0"' "$ray_folder" "$logs" "$keeps" || true
}

leave() {
  case $1 in
  0) exit 0 ;;
  75) requeue 75 ;;
  # Recipe, data, checkpoint, numerics, Ctrl-C: the next attempt would end the same way.
  2 | 3 | 4 | 77 | 130) exit "$1" ;;
  *) count_failure "$1" ;;
  esac
}

# Whether Slurm takes the nodes away. It signals all steps, Ray's too, so that megarl ends with whatever it lost first.
is_preempted() {
  local when
  when=$(scontrol show job "$SLURM_JOB_ID" --oneliner | grep -oE '\bPreemptTime=[^ ]+' | cut -d= -f2)
  # The time may be that of an earlier attempt.
  [[ $when == [0-9]* ]] && (($(date -d "$when" +%s) >= began))
}

# Lost nodes and dead engines: try again, but not for ever. A new checkpoint gives a new budget.
count_failure() {
  local num_failures step=0
  if is_preempted; then
    say "preempted, with exit code $1: not counted as a failure"
    broken=()
    requeue 75
  fi
  [[ ! -r $latest_step_file ]] || step=$(<"$latest_step_file")
  echo "$(date -u +%FT%TZ) $1 after step $step" >>"$job_folder/failures"
  num_failures=$(grep -c " after step $step\$" "$job_folder/failures")
  if ((num_failures > max_failures)); then
    say "failure $num_failures, with exit code $1: giving up"
    exit "$1"
  fi
  say "failure $num_failures of at most $max_failures, with exit code $1"
  requeue "$1"
}

# Print how many nodes of the job's reservation or partition can be used besides these, with commas between.
num_others() {
  local within=()
  [[ -z ${SLURM_JOB_RESERVATION:-} ]] || within=(--nodes="$(scontrol show reservation "$SLURM_JOB_RESERVATION" --oneliner |
    grep -oE '\bNodes=[^ ]+' | cut -d= -f2)")
  sinfo --noheader --Node --partition="$SLURM_JOB_PARTITION" "${within[@]}" --states=idle,alloc,mix,comp --format=%N |
    sort -u | grep -vxFcf <(tr , '\n' <<<"$1") || true
}

# Nodes that failed are not taken again, unless the job would wait for ever without them. Only a waiting job can be told
# so: this script outlives its end for a moment.
requeue() {
  local bad others
  bad=$(bad_nodes)
  if [[ -n $bad ]]; then
    others=$(num_others "$bad")
    if ((others < ${#nodes[@]})); then
      say "$bad not excluded: there are $others others, and the job needs ${#nodes[@]}; ask for spare nodes"
      bad=""
    fi
  fi
  say "queued again${bad:+, without $bad (their names are in $job_folder/bad_nodes)}"
  trap '' TERM
  scontrol requeue "$SLURM_JOB_ID"
  [[ -z $bad ]] || scontrol update "JobId=$SLURM_JOB_ID" "ExcNodeList=$bad" || say "$bad could not be excluded"
  exit "$1"
}

main
