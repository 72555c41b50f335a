#!/usr/bin/env bash
# On one CUDA card, each part in under ten minutes. Bits first: a wrong kernel's speed is of no interest.
#
#   bench/gpu.sh kernels    # bits of every kernel, and a run beyond 2^31 elements
#   bench/gpu.sh speed      # bandwidth of every kernel, host time of a call
#   bench/gpu.sh engine     # the engine on the card, and its step time beside FSDP2
#   bench/gpu.sh            # all of it
#   PYTHON=python3.12 bench/gpu.sh kernels
#
# Writes bench/results/<date>_gpu-{kernels,w1,staged}.{md,json}, and gpu-kernels.png.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHONPATH=".:kernels${PYTHONPATH:+:$PYTHONPATH}"
python=${PYTHON:-python}
part=${1:-all}
case $part in kernels | speed | engine | all) ;; *)
    echo "unknown part $part; expected kernels, speed, engine or nothing" >&2
    exit 2
    ;;
esac

nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.max.sm,power.limit --format=csv
"$python" - <<'PY'
import torch, triton
print(f"torch {torch.__version__}, CUDA {torch.version.cuda}, triton {triton.__version__}")
if not torch.cuda.is_available():
    raise SystemExit("torch sees no CUDA device")
PY

# That no tests were found is a failure, too.
must_pass() {
    local status=0
    timeout -k 10 "$1" "$python" -m pytest -q "${@:2}" || status=$?
    if [[ $status -ne 0 ]]; then
        echo "tests ended with exit code $status; no benchmark" >&2
        exit "$status"
    fi
}

if [[ $part == kernels || $part == all ]]; then
    # Some hundred kernels are compiled at their first use.
    must_pass 540 -m "not campaign" tests/kernels/test_agreement.py tests/kernels/test_table.py \
        tests/kernels/test_gpu.py tests/kernels/test_large.py
fi

if [[ $part == speed || $part == all ]]; then
    timeout 60 "$python" -m bench.kernels.launch
    timeout 60 "$python" -m bench.kernels.pinned
    measured=$(mktemp -d)
    trap 'rm -rf "$measured"' EXIT
    # One process a size, ours before the others, whose compilation takes long. Interrupted, pytest still writes down what
    # it has measured by then.
    measure() {
        timeout -s INT -k 10 "$1" "$python" -m pytest -q bench/kernels --sizes "$2" -k "$3" --benchmark-json="$measured/$2-$4.json" ||
            echo "not measured in full: $4 at $2 MiB (exit code $?)" >&2
    }
    for size in 256 1024 2048; do measure 50 "$size" "zeropp or deepspeed" ours; done
    for size in 64 16 1; do measure 25 "$size" "zeropp or deepspeed" ours; done
    measure 50 256 "eager or copy" eager
    measure 120 256 "compiled or copy" compiled
    shopt -s nullglob
    files=("$measured"/*.json)
    if ((${#files[@]} == 0)); then
        echo "nothing was measured" >&2
        exit 1
    fi
    "$python" -m bench.kernels.report "${files[@]}" --save gpu-kernels
fi

if [[ $part == engine || $part == all ]]; then
    must_pass 200 -m gpu tests/gpu

    # About 1.0e9 parameters at 8 k tokens a step where both systems fit side by side, a fifth of that elsewhere.
    memory_mib=$("$python" -c "import torch; print(torch.cuda.get_device_properties(0).total_memory >> 20)")
    if ((memory_mib >= 70000)); then
        size=(--layers 20 --d-model 2048 --heads 16 --seq-len 2048 --batch 4)
    else
        size=(--layers 16 --d-model 1024 --heads 16 --seq-len 1024 --batch 4)
    fi
    timeout 260 "$python" -m bench.step_time --device cuda --ranks 1 --dtype bf16 --systems fsdp2,zeropp \
        --rounds 12 --discard 2 --steps 5 --save gpu-w1 "${size[@]}"

    # Two ranks share the card, through gloo and host memory: for the engine's streams under load, not for its speed.
    timeout 110 "$python" -m bench.step_time --device cuda --ranks 2 --staged --dtype bf16 --systems fsdp2,zeropp \
        --rounds 4 --discard 1 --layers 4 --d-model 1024 --heads 16 --seq-len 256 --no-memory --save gpu-staged
fi
