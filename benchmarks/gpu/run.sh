#!/usr/bin/env bash
# Every check and measurement for a machine with one GPU, in less than 10 minutes:
#
#   bash benchmarks/gpu/run.sh [--smoke] [PART ...]
#
# Runs from the source tree; needs a Python with jax, flax, optax and orbax (PYTHON=... names it) and,
# for the part "torch", torch. No network. Each part is a process of its own with a time limit and leaves
# $OUT/PART.json (OUT: benchmarks/results/gpu-DATE); the summary is printed last. A part that is named
# alone has all of the time; "largest", which searches for the largest model, runs only when it is named.
# --smoke takes tiny sizes and works without a GPU. Exit status 1: a part failed or ran out of time.
set -uo pipefail
cd "$(dirname "$0")/../.."

# What is timed runs alone, the most important first. Checks share the GPU and run side by side.
readonly first="environment gpt2 llama optimizer offload"
readonly checks="stages offload_bits donation twin command target memory"
readonly last="torch"
readonly asked_for="largest"
readonly budget_seconds=560
readonly started=$SECONDS

smoke=""
wanted=""
for word in "$@"; do
  case $word in
    --smoke) smoke=--smoke ;;
    stages | twin | command | target | memory | environment | gpt2 | llama | optimizer | torch) wanted+=" $word" ;;
    offload | offload_bits | donation | largest) wanted+=" $word" ;;
    *)
      printf 'there is no part %s; parts: %s\n' "$word" "$first $checks $last $asked_for" >&2
      exit 2
      ;;
  esac
done
wanted=${wanted:-$first $checks $last}

out=${OUT:-benchmarks/results/gpu-$(date +%Y-%m-%d)}
mkdir -p "$out"
out=$(cd "$out" && pwd)
logs=$(mktemp -d)
# Files of offloaded state go beside the source: /tmp may be memory.
mkdir -p runs
scratch=$(mktemp -d "$PWD/runs/.scratch-XXXXXX")
trap 'rm -rf "$logs" "$scratch"' EXIT
export TMPDIR=$scratch
python=${PYTHON:-python3}
export PYTHONPATH=$PWD PYTHONUNBUFFERED=1
if [[ -n $smoke ]]; then
  export JAX_PLATFORMS=cpu JAX_DISABLE_MOST_OPTIMIZATIONS=1
fi

module_of() {
  case $1 in
    gpt2 | llama) printf 'end_to_end %s' "$1" ;;
    torch) printf 'torch_end_to_end --seconds %s' "$((limit * 2 / 3))" ;;
    offload) printf 'offload --seconds %s' "$((limit * 2 / 3))" ;;
    largest) printf 'largest --seconds %s' "$((limit - 10))" ;;
    *) printf '%s' "$1" ;;
  esac
}

limit_of() {
  # shellcheck disable=SC2086 # words
  if (($(printf '%s\n' $wanted | wc -l) == 1)); then
    printf '%s' "$budget_seconds"
    return
  fi
  case $1 in
    environment) printf 60 ;;
    llama) printf 150 ;;
    optimizer | offload) printf 180 ;;
    offload_bits) printf 150 ;;
    torch) printf 220 ;;
    *) printf 120 ;;
  esac
}

# Runs one part; its log and its exit status go to files.
part() {
  local name=$1 left=$((budget_seconds - (SECONDS - started))) began=$SECONDS status=0
  limit=$(limit_of "$name")
  if ((left < limit)); then limit=$left; fi
  rm -f "$out/$name.json"
  if ((limit < 15)); then
    printf 'left out: %s s of %s are over\n' "$((SECONDS - started))" "$budget_seconds" >"$logs/$name"
    printf '%s 0' "left out" >"$logs/$name.status"
    return
  fi
  # shellcheck disable=SC2046 # the module's own argument is a word of its own
  timeout --kill-after=5 "$limit" "$python" -m benchmarks.gpu.$(module_of "$name") \
    $smoke --out "$out" >"$logs/$name" 2>&1 || status=$?
  case $status in
    0) status=ok ;;
    124 | 137) status="out of time" ;;
    *) status="failed ($status)" ;;
  esac
  printf '%s %s' "$status" "$((SECONDS - began))" >"$logs/$name.status"
}

show() {
  printf '\n== %s: %s s\n' "$1" "$(cat "$logs/$1.status")"
  if [[ $(cat "$logs/$1.status") == ok* ]]; then
    cat "$logs/$1"
  else
    tail -n 40 "$logs/$1"
  fi
}

is_wanted() { [[ " $wanted " == *" $1 "* ]]; }

alone() {
  local name
  for name in "$@"; do
    if is_wanted "$name"; then
      part "$name"
      show "$name"
    fi
  done
}

side_by_side() {
  local name
  for name in "$@"; do
    # Memory taken as it is needed, since they share the device.
    if is_wanted "$name"; then XLA_PYTHON_CLIENT_PREALLOCATE=false part "$name" & fi
  done
  wait
  for name in "$@"; do
    if is_wanted "$name"; then show "$name"; fi
  done
}

# shellcheck disable=SC2086 # lists of words
{
  alone $first
  side_by_side $checks
  alone $last $asked_for
}

failed=0
printf '\n== summary after %s s, results in %s\n' "$((SECONDS - started))" "$out"
for name in $first $checks $last $asked_for; do
  if is_wanted "$name"; then
    printf '  %-12s %s s\n' "$name" "$(cat "$logs/$name.status")"
    [[ $(cat "$logs/$name.status") == ok* ]] || failed=1
  fi
done
"$python" -m benchmarks.gpu.summary "$out" || failed=1
exit $failed
