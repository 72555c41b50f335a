#!/usr/bin/env bash
# Measurements and checks on one CUDA GPU ("card"), in eight parts. The most useful part comes first. Part nccl takes at
# most ten minutes, each other part at most six.
#
#   bench/gpu.sh look       # some of the checks; steps at 1.3 B and 0.37 B parameters compared with plain torch, FSDP2
#                           # and DeepSpeed; kernels at 256 MiB; live memory by phase; compiled blocks; offload
#   bench/gpu.sh examples   # each script of examples/ that runs on one card: a few steps, then again from a checkpoint
#   bench/gpu.sh bits       # results of kernels bit for bit; delayed streams; NCCL with one rank; tests of the engine
#   bench/gpu.sh nccl       # 2 and 4 ranks over NCCL on one card: results bit for bit, memory, lost ranks
#   bench/gpu.sh offload    # results with states and weights off the card; steps compared with FSDP2's offload; copies
#   bench/gpu.sh engine     # steps, memory and host time compared with FSDP2 at 0.3, 1 and 3 B parameters; a timeline
#   bench/gpu.sh kernels    # bandwidth of every kernel, host time of a call, copies between host and device
#   bench/gpu.sh reasons    # performance counters of kernels, if Nsight Compute (ncu) is installed
#   bench/gpu.sh            # all parts, up to the first wrong result
#   bench/gpu.sh --dry-run  # all parts on CPU, with tiny sizes and a stand-in for ncu
#
# A part that was interrupted continues when it is started again: results of the same sources on the same card are kept
# in runs/gpu (--keep=DIR). Each part prints one table and writes it to bench/results (--results=DIR). A dry run writes
# to a temporary folder. --only=NAME runs the steps whose names begin with NAME. --seconds=N ends each part after N
# seconds.
#
# Recommended calls for the first 15 minutes on a new card. Each of the two calls takes less than ten minutes:
#
#   bench/gpu.sh look --seconds=330; bench/gpu.sh examples --seconds=220
#
# look needs about five minutes and examples about three. They are separate commands, so that a wrong result in look
# does not keep examples from starting. The second call, of five minutes, runs the remaining steps:
#
#   bench/gpu.sh look --seconds=120; bench/gpu.sh bits --seconds=170
#
# In the second call, look skips finished steps and runs those that had no time. bits uses the rest of the time, test by
# test. Later calls on a card start with bits, which continues, then run nccl, offload, engine and kernels. Each part
# but nccl fits into one call of six minutes; bits and offload may need a second call. The folder of --keep must outlive
# the machine for that.
#
# nccl needs NCCL 2.30 or later, which allows several ranks on one card. The NCCL of current torch versions is older.
# NCCL_LIBRARY names the library to load instead, either the file itself or an .xz file, which is unpacked beside it:
#
#   pip download --no-deps nvidia-nccl-cu13==2.30.4 && unzip nvidia_nccl_cu13-*.whl nvidia/nccl/lib/libnccl.so.2
#   NCCL_LIBRARY=nvidia/nccl/lib/libnccl.so.2 bench/gpu.sh nccl
#
# To shrink the library for a slow connection, overwrite the device code of all other architectures with zeros: each
# fatbin in the file (magic number 0xBA55ED50) lists its entries with kind, architecture and size. xz then compresses
# the 247 MB of version 2.30.4 to 39 MB.
#
# Exit codes: 0 for success; 1 for a wrong result; 2 for a command line or a machine that cannot be used; 3 if time ran
# out before all steps were done, so the part should be started again.
#
#   PYTHON=python3.12 bench/gpu.sh bits
#   WHEELS=folder bench/gpu.sh bits   # installs missing packages from wheels in a folder, without a network
#
# Wheels that may be needed: pydantic, pydantic-core, annotated-types and typing-inspection for all parts; pytest,
# pytest-benchmark, pytest-xdist and their dependencies for look, bits and kernels; tqdm, transformers, accelerate,
# safetensors and lightning for examples.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3}
part_seconds=360
nccl_seconds=600

every=(look examples bits nccl offload engine kernels reasons)
parts=()
flags=()
for word in "$@"; do
    case $word in
        look | examples | bits | nccl | offload | engine | kernels | reasons) parts+=("$word") ;;
        --*) flags+=("$word") ;;
        *)
            echo "unknown part $word; expected ${every[*]}, or none of them for all" >&2
            exit 2
            ;;
    esac
done
((${#parts[@]})) || parts=("${every[@]}")

export PYTHONPATH="$PWD:$PWD/kernels${PYTHONPATH:+:$PYTHONPATH}"
if [[ -n ${WHEELS:-} ]]; then
    site=$(mktemp -d)
    trap 'rm -rf "$site"' EXIT
    timeout -k 5 60 "$python" -m pip install --quiet --no-index --find-links "$WHEELS" --no-deps --target "$site" \
        "$WHEELS"/*.whl
    export PYTHONPATH="$PYTHONPATH:$site"
fi

worst=0
for part in "${parts[@]}"; do
    status=0
    limit=$part_seconds
    [[ $part != nccl ]] || limit=$nccl_seconds
    # The part ends by itself before the limit, with a table; the limit is for a part that hangs. It includes the time
    # of the installation.
    timeout -k 5 $((limit - SECONDS)) "$python" -m bench.gpu "$part" "${flags[@]}" || status=$?
    ((status == 124)) && status=3
    ((status == 0)) || worst=$status
    # Continue only after success (0) or lack of time (3): speed does not matter if results are wrong.
    ((status == 0 || status == 3)) || break
    SECONDS=0
done
exit "$worst"
