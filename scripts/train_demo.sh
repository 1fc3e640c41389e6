#!/bin/sh
# Trains the demo trio: tokenizer, target, continuations, drafter, Weaver.
#
#     scripts/train_demo.sh CORPUS RUNS
#
# CORPUS holds train.jsonl.xz and val.jsonl.xz of scripts/build_corpus.py, or text of your own in the same form. Cut it
# anywhere and run it again: every stage goes on from its last checkpoint, finished ones are skipped.
set -eu
corpus=$1
runs=$2
scripts=$(dirname "$0")

# Bit-exact resumption on a GPU: no atomic sums, and the same compiled step after a restart.
export XLA_FLAGS="${XLA_FLAGS:---xla_gpu_exclude_nondeterministic_ops=true}"
export JAX_COMPILATION_CACHE_DIR="${JAX_COMPILATION_CACHE_DIR:-$runs/cache}"
mkdir -p "$runs"

[ -f "$runs/tokenizer.json" ] || python "$scripts/make_tokenizer.py" "$corpus/train.jsonl.xz" "$runs/tokenizer.json"

[ -f "$runs/target/model/config.json" ] || python "$scripts/train_target.py" --run "$runs/target" \
    --text "$corpus/train.jsonl.xz" --held-out "$corpus/val.jsonl.xz" --tokenizer "$runs/tokenizer.json"

[ -f "$runs/continuations.npz" ] || python "$scripts/sample_continuations.py" --model "$runs/target/model" \
    --text "$corpus/train.jsonl.xz" --tokenizer "$runs/tokenizer.json" --output "$runs/continuations.npz"

[ -f "$runs/drafter/model/config.json" ] || python "$scripts/train_drafter.py" --run "$runs/drafter" \
    --model "$runs/target/model" --continuations "$runs/continuations.npz"

[ -f "$runs/weaver/model/config.json" ] || python "$scripts/train_weaver.py" --run "$runs/weaver" \
    --model "$runs/drafter/model" --continuations "$runs/continuations.npz"
