#!/usr/bin/env bash
# Question: what do the built-in runs look like, and what real GPU runs of which histograms or statistics were logged? Draws
# plots/ anew from them; the same program gives the same bytes.
# Command: bash experiments/gallery.sh
set -euo pipefail
cd "$(dirname "$0")/.."
cargo build --release --quiet
for run in cnn transformer; do
  for kind in tradeoff trajectory rates binades headroom policies; do
    target/release/gradscale plot --demo "$run" --kind "$kind" -o "plots/$run-$kind.svg" --quiet
  done
done
# Logs: a scale that keeps touching its ceiling, and one that falls to the floor.
for log in deepspeed-wrapped-sawtooth fairseq-diverge-floor; do
  target/release/gradscale plot "tests/data/logs/$log.log" --kind history -o "plots/log-$log.svg" --quiet
done
# What other growth intervals would have cost real GPU runs: plots/gpu-runs.svg.
cargo run --release --quiet --example gpu_runs > /dev/null
# One run of a file of several: the header and its rows.
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
data=tests/data/histograms
cp "$data/wandb_speechsep_grad_hist.csv" "$work/GPU: speech separation, 2 x RTX 2070 SUPER.csv"
cp "$data/msprobe_resnet50_gpu_grad_stats.csv" "$work/GPU: ResNet-50, statistics of two steps.csv"
grep -E '^(run|0),' "$data/wandb_cnn_grad_hist.csv" > "$work/GPU: small U-Net at its first step, RTX 2080.csv"
for pair in "speechsep:GPU: speech" "resnet50:GPU: ResNet" "unet:GPU: small"; do
  name=${pair%%:*} file=$(ls "$work/${pair#*:}"*)
  (cd "$work" && "$OLDPWD/target/release/gradscale" plot "$(basename "$file")" --kind rates -o "$OLDPWD/plots/gpu-$name-rates.svg" --quiet)
done
