#!/usr/bin/env bash
# What to run in the first minutes on a GPU: facts of the card, correctness, benchmarks, the CPU suite beside the card.
#
#   scripts/first_card.sh [--dry-run] [--results DIR] [--wheels DIR] [--seconds N] [STAGE ...]
#
# Stages, in this order, each under nine minutes and usable alone: imports facts correctness sanitizer quick full-1
# full-2 full-3 suite-visible suite-hidden; full-1 to full-3 are parts of the benchmarks at full size. The machine may
# be bare: no network, nothing installed but torch, Lightning, xxhash and pytest; wheels of DIR are put on the path
# without their dependencies. Tests of the command line and of paged optimizers, and the rows of Liger, need some:
# docs/gpu.md has the command that fetches them. Everything is written below the results folder, with one line a stage
# in stages.jsonl, from which docs/gpu.md is made once the folder's files are committed to benchmarks/results. A
# failing stage does not keep later ones from running; the exit code is 1 if one failed.
# --dry-run starts every stage on any machine, and skips with one line what needs a card.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

STAGES="imports facts correctness sanitizer quick full-1 full-2 full-3 suite-visible suite-hidden"
DRY_RUN=false RESULTS=first_card WHEELS="" SECONDS_A_STAGE=525 KILL_AFTER=12 CHOSEN=""
PYTHON=${PYTHON:-python3}
while [ $# -gt 0 ]; do
  case "$1" in
    --dry-run) DRY_RUN=true ;;
    --results | --wheels | --seconds)
      [ $# -ge 2 ] || { echo "$1 needs a value; see the head of scripts/first_card.sh." >&2; exit 2; }
      case "$1" in
        --results) RESULTS=$2 ;;
        --wheels) WHEELS=$2 ;;
        --seconds) SECONDS_A_STAGE=$2 ;;
      esac
      shift ;;
    *)
      case " $STAGES " in
        *" $1 "*) CHOSEN="$CHOSEN $1" ;;
        *) echo "stage '$1' is unknown; the stages are: $STAGES." >&2; exit 2 ;;
      esac ;;
  esac
  shift
done
[[ $SECONDS_A_STAGE =~ ^[1-9][0-9]*$ ]] || { echo "--seconds $SECONDS_A_STAGE is no count of seconds." >&2; exit 2; }

mkdir -p "$RESULTS" || exit 2
RESULTS=$(cd "$RESULTS" && pwd)
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
if [ -n "$WHEELS" ]; then
  [ -d "$WHEELS" ] || { echo "--wheels $WHEELS is no folder; give one that holds .whl files." >&2; exit 2; }
  "$PYTHON" -m pip install --quiet --no-index --no-deps --upgrade --target "$RESULTS/site" "$WHEELS"/*.whl || exit 2
  export PYTHONPATH="$PYTHONPATH:$RESULTS/site"
fi

if "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then HAS_CARD=true; else HAS_CARD=false; fi
WORKERS=$("$PYTHON" -c 'import importlib.util as u, os; print(max(1, min(14, os.cpu_count() - 2)) if u.find_spec("xdist") else 0)')

# Runs a command within what the stage has left, and keeps what it prints.
within() {
  timeout --kill-after="$KILL_AFTER" "$SECONDS_A_STAGE" "$@" 2>&1 | tee -a "$RESULTS/$STAGE.log"
  return "${PIPESTATUS[0]}"
}

skip() {
  echo "$STAGE: skipped, $1"
  STATUS=skipped
}

suite() {
  # pytest-benchmark, where it is installed, warns of workers, and warnings are errors here. Files keep their order: after
  # those of the simulated device no fork of a process can run a backward. Names are said at once: of workers that crash
  # no summary may be left.
  local options=(-v -m "not slow and not gpu" --maxfail 30 -p no:benchmark)
  [ "$WORKERS" -gt 0 ] && options+=(--numprocesses "$WORKERS" --dist loadfile --no-loadscope-reorder)
  if $DRY_RUN; then options=(-q -m "not slow and not gpu" tests/memory/test_measure.py); fi
  OMP_NUM_THREADS=1 within "$PYTHON" -m pytest "${options[@]}"
}

# Rows end by themselves before the stage is stopped. By their needs, parts of the full size take 0.8 of it.
benchmark() {
  $HAS_CARD || { skip "benchmarks.gpu times a CUDA device"; return 0; }
  within "$PYTHON" -m benchmarks.gpu "$@" --seconds $((SECONDS_A_STAGE - 15)) --results "$RESULTS"
}

run_stage() {
  case "$STAGE" in
    imports) within "$PYTHON" scripts/import_everything.py ;;
    facts)
      $HAS_CARD || { skip "it asks a CUDA device"; return 0; }
      within "$PYTHON" scripts/card_facts.py --results "$RESULTS" ;;
    correctness)  # without a card pytest itself skips these, with one line
      within "$PYTHON" -m pytest -m gpu -q -ra tests/gpu tests/optim/fused/test_gpu.py ;;
    sanitizer)
      $HAS_CARD || { skip "it watches kernels on a CUDA device"; return 0; }
      command -v compute-sanitizer >/dev/null || { skip "compute-sanitizer is not installed"; return 0; }
      within compute-sanitizer --tool memcheck --error-exitcode 9 \
        "$PYTHON" -m pytest -q -x tests/optim/fused/kernel_cases_*.py ;;
    quick) benchmark --quick ;;
    full-1) benchmark --only optimizer_step loss_head activations optimizer_offload attention ;;
    full-2) benchmark --only prediction budget ;;
    full-3) benchmark --only end_to_end ;;
    suite-visible)
      $HAS_CARD || { skip "the suite runs the same with the card hidden"; return 0; }
      suite ;;
    suite-hidden) CUDA_VISIBLE_DEVICES="" suite ;;
  esac
}

WORST=0
for STAGE in ${CHOSEN:-$STAGES}; do
  echo "== $STAGE"
  : >"$RESULTS/$STAGE.log"
  BEGAN=$(date +%s) STATUS=passed
  run_stage
  CODE=$?
  [ $CODE -eq 0 ] || { STATUS="failed with exit code $CODE"; WORST=1; }
  [ $CODE -eq 124 ] && STATUS="stopped after $SECONDS_A_STAGE s"
  echo "$STAGE: $STATUS, $(($(date +%s) - BEGAN)) s"
  $DRY_RUN || STAGE=$STAGE STATUS=$STATUS "$PYTHON" scripts/card_facts.py --note "$RESULTS/stages.jsonl"
done
exit $WORST
