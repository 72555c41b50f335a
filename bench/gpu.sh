#!/usr/bin/env bash
# On one CUDA card, in under ten minutes: what the card is, the GPU tests, and step time beside FSDP2.
#
#   bench/gpu.sh                 # writes bench/results/<date>_gpu-{w1,staged}.{md,json}
#   PYTHON=python3.12 bench/gpu.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python}

nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.max.sm,power.limit --format=csv
"$python" - <<'PY'
import torch, triton
print(f"torch {torch.__version__}, CUDA {torch.version.cuda}, triton {triton.__version__}")
if not torch.cuda.is_available():
    raise SystemExit("torch sees no CUDA device")
PY

# The tests come first: a wrong kernel's speed is of no interest. That none were found is a failure, too.
status=0
timeout 200 "$python" -m pytest -q -m gpu tests/gpu || status=$?
if [[ $status -ne 0 ]]; then
    echo "the GPU tests ended with exit code $status; no benchmark" >&2
    exit "$status"
fi

# About 1.0e9 parameters at 8 k tokens a step where both systems fit side by side, a fifth of that elsewhere.
memory_mib=$(nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits | head -n 1)
if ((memory_mib >= 70000)); then
    size=(--layers 20 --d-model 2048 --heads 16 --seq-len 2048 --batch 4)
else
    size=(--layers 16 --d-model 1024 --heads 16 --seq-len 1024 --batch 4)
fi
timeout 260 "$python" bench/step_time.py --device cuda --ranks 1 --dtype bf16 --systems fsdp2,zeropp \
    --rounds 12 --discard 2 --steps 5 --save gpu-w1 "${size[@]}"

# Two ranks share the card, through gloo and host memory: for the engine's streams under load, not for its speed.
timeout 110 "$python" bench/step_time.py --device cuda --ranks 2 --staged --dtype bf16 --systems fsdp2,zeropp \
    --rounds 4 --discard 1 --layers 4 --d-model 1024 --heads 16 --seq-len 256 --no-memory --save gpu-staged
