#!/usr/bin/env bash
# Measurements and checks on one CUDA card, in eight parts in the order of their worth. nccl takes at most ten minutes,
# and each of the others six.
#
#   bench/gpu.sh look       # a selection of the checks; steps at 1.3 B and 0.37 B parameters beside plain torch, FSDP2
#                           # and DeepSpeed; kernels at 256 MiB; live memory by phase; compiled blocks; offload
#   bench/gpu.sh examples   # every script of examples/ that one card can run, a few steps, and again from a checkpoint
#   bench/gpu.sh bits       # bits of kernels; streams under delay; hops over NCCL with one rank; the engine's tests
#   bench/gpu.sh nccl       # 2 and 4 ranks over NCCL on the one card: bits, memory, ranks that are lost
#   bench/gpu.sh offload    # bits with states and weights off the card; steps beside FSDP2 with offload; the bus
#   bench/gpu.sh engine     # steps, memory and host time beside FSDP2 at 0.3, 1 and 3 B parameters; a timeline
#   bench/gpu.sh kernels    # bandwidth of every kernel, host time of a call, copies over the bus
#   bench/gpu.sh reasons    # the counters behind a kernel's speed, where Nsight Compute (ncu) is installed
#   bench/gpu.sh            # all of them, up to the first wrong result
#   bench/gpu.sh --dry-run  # the same on CPU, with tiny sizes and a stand-in for ncu
#
# A part that is started again goes on where it was interrupted: results of the same sources on the same card are kept
# in runs/gpu (--keep=DIR). Each part prints one table, which goes to bench/results (--results=DIR); a dry run's goes to
# a temporary folder. --only=NAME runs the steps whose names begin so; --seconds=N ends each part that early.
#
# The first 15 minutes on a new card, in two calls of which none takes ten:
#
#   bench/gpu.sh look --seconds=330; bench/gpu.sh examples --seconds=220
#
# look needs about five minutes and examples about three. Both are commands of their own, so that a wrong result in the
# first does not keep the second from starting. What is left goes into the second call, of five minutes:
#
#   bench/gpu.sh look --seconds=120; bench/gpu.sh bits --seconds=170
#
# In the second call look skips the steps that it has finished, and runs those that it had no time for. bits takes the
# rest of the time, by single tests. The next calls on a card begin with bits, which goes on, then nccl, offload, engine
# and kernels: each but nccl fits one call of six minutes, and bits and offload may take a second one. Files in --keep
# must outlive the machine for that.
#
# nccl needs NCCL 2.30 or later, which takes several ranks on one card; torch brings an older one so far. NCCL_LIBRARY
# names the library to put before it, as it is or as an .xz file, which is unpacked beside itself:
#
#   pip download --no-deps nvidia-nccl-cu13==2.30.4 && unzip nvidia_nccl_cu13-*.whl nvidia/nccl/lib/libnccl.so.2
#   NCCL_LIBRARY=nvidia/nccl/lib/libnccl.so.2 bench/gpu.sh nccl
#
# To make it small for a slow link, overwrite with zeros the device code of all architectures but the card's: each fatbin
# in the file (magic number 0xBA55ED50) lists its entries with kind, architecture and size. Then xz makes 39 MB of the
# 247 MB of version 2.30.4.
#
# Exit code: 0; 1 for a wrong result; 2 for a command line or a machine that cannot be used; 3 if something was not
# measured in time: start it again.
#
#   PYTHON=python3.12 bench/gpu.sh bits
#   WHEELS=folder bench/gpu.sh bits   # installs the missing packages from wheels, without a network
#
# Wheels to bring where packages are missing: pydantic, pydantic-core, annotated-types, typing-inspection for all parts;
# pytest, pytest-benchmark, pytest-xdist and what they need for look, bits and kernels; tqdm, transformers, accelerate,
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
    # The part itself ends earlier, with a table; this is for one that hangs. Installing counts.
    timeout -k 5 $((limit - SECONDS)) "$python" -m bench.gpu "$part" "${flags[@]}" || status=$?
    ((status == 124)) && status=3
    ((status == 0)) || worst=$status
    # What is wrong need not be fast.
    ((status == 0 || status == 3)) || break
    SECONDS=0
done
exit "$worst"
