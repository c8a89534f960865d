#!/usr/bin/env bash
# Question: what do the built-in runs look like? Draws plots/ anew from them; the same program gives the same bytes.
# Command: bash experiments/gallery.sh
set -euo pipefail
cd "$(dirname "$0")/.."
cargo build --release --quiet
for run in cnn transformer; do
  for kind in tradeoff trajectory rates binades headroom policies; do
    target/release/gradscale plot --demo "$run" --kind "$kind" -o "plots/$run-$kind.svg" --quiet
  done
done
