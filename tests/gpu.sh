#!/usr/bin/env bash
# What needs a GPU to be known: that its counts are the same integers, and how fast they come.
#
#     tests/gpu.sh            on a machine with an NVIDIA GPU, torch and numpy; nothing is fetched; under four minutes
#     tests/gpu.sh record     records the built-in runs on the GPU (experiments/record_run.py); under eight minutes
#     tests/gpu.sh shim       the same steps as the first, tiny, on a host that stands in for the GPU (needs a C++ compiler)
#     tests/gpu.sh prepare    builds the program and its kernel tests and puts them into target/gpu, to be taken to a machine
#                             without Rust
#
# The program is GRADSCALE_BIN, target/gpu/gradscale or target/release/gradscale; its kernel tests are target/gpu/kernel-tests. Where one is
# missing, its step is skipped and that is said. Results go to OUT (target/gpu-results). PYTHON is the Python that has torch.
set -euo pipefail
cd "$(dirname "$0")/.."
what=${1:-gpu}
out=${OUT:-target/gpu-results}
python=${PYTHON:-python3}
mkdir -p "$out"

say() { printf '\n== %s\n' "$*"; }

case $what in
prepare)
    target=${CARGO_TARGET_DIR:-target}
    cargo build --locked --release
    tests=$(cargo test --locked --test kernel --no-run 2>&1 | sed -n 's/.*Executable.*(\(.*\)).*/\1/p')
    mkdir -p target/gpu
    cp "$target/release/gradscale" target/gpu/gradscale
    cp "$tests" target/gpu/kernel-tests
    # Debug information weighs most of it.
    strip target/gpu/kernel-tests
    ls -l target/gpu
    exit
    ;;
record)
    # Deterministic products on the GPU ask for this.
    export CUBLAS_WORKSPACE_CONFIG=:4096:8
    running=()
    for name in cnn transformer; do
        timeout 450 "$python" experiments/record_run.py "$name" --device cuda --out "$out" >"$out/$name.log" 2>&1 &
        running+=($!)
    done
    failed=0
    for one in "${running[@]}"; do wait "$one" || failed=1; done
    tail -n 3 "$out"/*.log
    exit "$failed"
    ;;
gpu | shim) ;;
*)
    echo "tests/gpu.sh: found \"$what\", expected nothing, record, shim or prepare" >&2
    exit 2
    ;;
esac

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
driver=()
if [ "$what" = shim ]; then
    if ! command -v c++ >/dev/null; then
        echo 'SKIPPED: the shim of CUDA: there is no C++ compiler' >&2
        exit 0
    fi
    c++ -std=c++17 -O2 -ffp-contract=off -w -fPIC -shared -Wl,-soname,libcuda.so.1 tests/cuda_shim/shim.cpp -o "$scratch/libcuda.so.1"
    driver=(env "LD_LIBRARY_PATH=$scratch")
else
    nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
fi

program=${GRADSCALE_BIN:-}
for candidate in target/gpu/gradscale target/release/gradscale; do
    if [ -z "$program" ] && [ -x "$candidate" ]; then program=$candidate; fi
done

say 'the recorder, on the device'
"$python" tests/gpu.py "$what" --shim "$scratch/libcuda.so.1" --out "$out"

say 'the program, on the device'
if [ -n "$program" ]; then
    "$python" tests/gpu.py dumps --into "$scratch"
    for dump in "$scratch"/*.npy; do
        for more in '' '--errors --scales 2^-8..2^32' '--errors --scales 0.3,777.5,65536 --flush-subnormals' '--format bf16 --scales 0.3,3'; do
            # shellcheck disable=SC2086
            "${driver[@]}" "$program" analyze "$dump" --json --quiet --backend cuda $more >"$scratch/device.json"
            # shellcheck disable=SC2086
            "$program" analyze "$dump" --json --quiet --backend scalar $more >"$scratch/scalar.json"
            grep -q '"backend": "cuda"' "$scratch/device.json"
            diff <(grep -v '"backend"' "$scratch/device.json") <(grep -v '"backend"' "$scratch/scalar.json")
        done
    done
    echo "equal: $(ls "$scratch"/*.npy | wc -l) dumps, four ways each"
else
    echo 'SKIPPED: there is no program (GRADSCALE_BIN, target/gpu/gradscale, target/release/gradscale)' >&2
fi

say 'every boundary set of tests/kernel.rs'
if [ -x target/gpu/kernel-tests ] && [ "$what" = gpu ]; then
    GRADSCALE_NEED_BACKENDS=cuda target/gpu/kernel-tests --skip cuda:: --skip the_flag
elif [ "$what" = gpu ]; then
    echo 'SKIPPED: there is no target/gpu/kernel-tests; tests/gpu.sh prepare makes it' >&2
else
    echo 'cargo test --test kernel runs them on this shim'
fi

say 'compute-sanitizer'
failed=0
if [ "$what" = gpu ] && [ -n "$program" ] && command -v compute-sanitizer >/dev/null; then
    for tool in memcheck initcheck racecheck; do
        for dump in "$scratch"/small-*.npy; do
            compute-sanitizer --tool "$tool" --error-exitcode 3 "$program" analyze "$dump" --backend cuda --errors --quiet >"$scratch/said" 2>&1 ||
                {
                    echo "$tool on $dump:"
                    tail -n 40 "$scratch/said"
                    cp "$scratch/said" "$out/$tool.txt"
                    # The lowest bit so far is read while others lower it, on purpose: racecheck may say so.
                    [ "$tool" = racecheck ] || failed=1
                }
        done
        echo "$tool: done"
    done
else
    echo 'SKIPPED: no compute-sanitizer, no program, or no GPU' >&2
fi

[ "$failed" = 0 ] || exit 1
say 'done'
