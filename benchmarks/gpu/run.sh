#!/usr/bin/env bash
# Every check and measurement for a machine with one GPU, in less than 10 minutes:
#
#   bash benchmarks/gpu/run.sh [--smoke] [PART ...]
#
# Runs from the source tree; needs a Python with jax, flax, optax and orbax (PYTHON=... names it) and,
# for the part "torch", torch. No network. Each part is a process of its own with a time limit, and
# what it has measured by then is kept. Leaves two files in $OUT (benchmarks/results/gpu-DATE), which
# are written anew after each part: gpu.json, all that was measured, and gpu.log, all that was said.
# The summary is printed last; `python -m benchmarks.gpu.report gpu.json ...` makes tables.
# Few parts have more time each than many; "largest", which searches for the largest model, and
# "features", which trains on the GPU and on the CPU with one feature each, run only when they are
# named. --smoke takes tiny sizes and works without a GPU. Exit status 1: a part failed
# or ran out of time.
set -uo pipefail
cd "$(dirname "$0")/../.."

# What is timed runs alone, the most important first. Checks share the GPU and run side by side.
readonly first="environment optimizer tune experts gpt2 llama decoding torch"
readonly checks="attention stages memory command offload_bits donation twin target"
readonly last="offload features largest"
readonly by_default="$first $checks offload"
readonly seconds_for_checks=100
# Checks of values alone: without trying kernels they compile in a fraction of the time (on an H200
# the first step of "stages" took 97 s of its 130 beside seven other checks).
readonly values_alone="stages offload_bits donation twin command features"
readonly started=$SECONDS

smoke=""
wanted=""
for word in "$@"; do
  if [[ $word == --smoke ]]; then
    smoke=--smoke
  elif [[ " $by_default features largest " == *" $word "* ]]; then
    wanted+=" $word"
  else
    printf 'there is no part %s; parts: %s\n' "$word" "$by_default features largest" >&2
    exit 2
  fi
done
wanted=${wanted:- $by_default}
# A smoke run borrows no GPU, and may run on two busy cores.
readonly budget_seconds=${BUDGET_SECONDS:-$([[ -n $smoke ]] && printf 2400 || printf 565)}

out=${OUT:-benchmarks/results/gpu-$(date +%Y-%m-%d)}
mkdir -p "$out"
out=$(cd "$out" && pwd)
# Files of offloaded state go beside the source: /tmp may be memory.
mkdir -p runs
scratch=$(mktemp -d "$PWD/runs/.scratch-XXXXXX")
readonly parts=$scratch/parts
mkdir "$parts"
trap 'rm -rf "$scratch"' EXIT
trap 'exit 143' TERM INT
export TMPDIR=$scratch
python=${PYTHON:-python3}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
if [[ -n $smoke ]]; then
  export JAX_PLATFORMS=cpu JAX_DISABLE_MOST_OPTIMIZATIONS=1
else
  export JAX_PLATFORMS=${JAX_PLATFORMS:-cuda,cpu}
  # What the compiler tried out for one product is known to the next part; programs are not kept.
  export JAX_COMPILATION_CACHE_DIR=$scratch/tried JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=1000000
fi

module_of() {
  case $1 in
    gpt2 | llama) printf 'end_to_end %s' "$1" ;;
    torch) printf 'torch_end_to_end --seconds %s' "$((limit * 3 / 5))" ;;
    optimizer) printf 'optimizer --seconds %s' "$((limit * 2 / 3))" ;;
    offload) printf 'offload --seconds %s' "$((limit * 2 / 3))" ;;
    largest) printf 'largest --seconds %s' "$((limit - 10))" ;;
    features) printf 'features --seconds %s' "$((limit - 10))" ;;
    *) printf '%s' "$1" ;;
  esac
}

# Seconds of a part among many others.
usual_limit() {
  case $1 in
    environment) printf 40 ;;
    tune) printf 90 ;;
    experts | decoding) printf 110 ;;
    torch) printf 150 ;;
    *) printf 130 ;;
  esac
}

# Seconds of a part: more where few parts are wanted. Tiny sizes end by themselves, and eight checks
# side by side on two busy cores may take ten minutes for it.
limit_of() {
  local name all=0 of_checks=0
  if [[ -n $smoke ]]; then
    printf '%s' "$budget_seconds"
    return
  fi
  for name in $wanted; do
    if [[ " $checks " == *" $name "* ]]; then
      of_checks=$(usual_limit "$name")
    else
      all=$((all + $(usual_limit "$name")))
    fi
  done
  all=$((all + of_checks))
  if ((all > budget_seconds)); then all=$budget_seconds; fi
  printf '%s' "$(($(usual_limit "$1") * budget_seconds / all))"
}

# Seconds that may still be used before this part has to leave the rest to the checks.
left_for() {
  local left=$((budget_seconds - (SECONDS - started))) check
  if [[ " $first " == *" $1 "* ]]; then
    for check in $checks; do
      if is_wanted "$check"; then
        printf '%s' "$((left - seconds_for_checks))"
        return
      fi
    done
  fi
  printf '%s' "$left"
}

is_wanted() { [[ " $wanted " == *" $1 "* ]]; }

# Runs one part; what it prints and its exit status go to files.
part() {
  local name=$1 began=$SECONDS status=0 left
  limit=$(limit_of "$name")
  left=$(left_for "$name")
  if ((left < limit)); then limit=$left; fi
  if ((limit < 15)); then
    printf 'left out: %s s of %s are over\n' "$((SECONDS - started))" "$budget_seconds" >"$parts/$name.log"
    printf 'left out: 0 s' >"$parts/$name.status"
    return
  fi
  local flags=${XLA_FLAGS:-}
  if [[ -z $smoke && " $values_alone " == *" $name "* ]]; then
    flags+=" --xla_gpu_autotune_level=0"
  fi
  # shellcheck disable=SC2046 # the module's own argument is a word of its own
  XLA_FLAGS=$flags timeout --kill-after=5 "$limit" "$python" -m benchmarks.gpu.$(module_of "$name") \
    $smoke --out "$parts" >"$parts/$name.log" 2>&1 || status=$?
  case $status in
    0) status=ok ;;
    124 | 137) status="out of time" ;;
    *) status="failed ($status)" ;;
  esac
  printf '%s: %s s' "$status" "$((SECONDS - began))" >"$parts/$name.status"
}

# To the screen what fits, to the log all of it; and all parts so far into one file.
show() {
  printf '\n== %s: %s\n' "$1" "$(cat "$parts/$1.status")" | tee -a "$out/gpu.log"
  cat "$parts/$1.log" >>"$out/gpu.log"
  if [[ $(cat "$parts/$1.status") == ok* ]]; then
    cat "$parts/$1.log"
  else
    tail -n 40 "$parts/$1.log"
  fi
  "$python" -m benchmarks.gpu.collect "$parts" "$out/gpu.json"
}

alone() {
  local name
  for name in "$@"; do
    if is_wanted "$name"; then
      # torch and JAX share the device in two parts: neither takes all of it at the start.
      XLA_PYTHON_CLIENT_MEM_FRACTION=${XLA_PYTHON_CLIENT_MEM_FRACTION:-0.9} part "$name"
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

rm -f "$out/gpu.json" "$out/gpu.log"
if [[ -z $smoke ]]; then
  # Where its plugin cannot start, JAX goes on with the CPU, on which full sizes take hours.
  asked='import jax; raise SystemExit(jax.default_backend() != "gpu" and f"found {jax.devices()}")'
  if ! timeout 120 "$python" -c "$asked" >"$out/gpu.log" 2>&1; then
    cat "$out/gpu.log"
    printf 'JAX sees no GPU; --smoke shows without one that everything runs\n' | tee -a "$out/gpu.log"
    exit 1
  fi
fi
# shellcheck disable=SC2086 # lists of words
{
  alone $first
  side_by_side $checks
  alone $last
}

failed=0
again=""
printf '\n== summary after %s s, results in %s\n' "$((SECONDS - started))" "$out"
for name in $first $checks $last; do
  if is_wanted "$name"; then
    printf '  %-12s %s\n' "$name" "$(cat "$parts/$name.status")"
    if [[ $(cat "$parts/$name.status") != ok* ]]; then
      failed=1
      again+=" $name"
    fi
  fi
done
"$python" -m benchmarks.gpu.summary "$out/gpu.json" 2>&1 | tee -a "$out/gpu.log" || failed=1
if [[ -n $again ]]; then
  printf '\nonce more, what is missing: bash benchmarks/gpu/run.sh%s%s\n' "${smoke:+ $smoke}" "$again"
fi
exit $failed
