#!/usr/bin/env bash
# What one CUDA card can tell, in five parts of at most six minutes each, in the order of their worth.
#
#   bench/gpu.sh bits       # bits of kernels; streams under delay; hops over NCCL with one rank; the engine's tests
#   bench/gpu.sh offload    # bits with states and weights off the card; steps beside FSDP2 with offload; the bus
#   bench/gpu.sh engine     # steps, memory and host time beside FSDP2 at 0.3, 1 and 3 B parameters; a timeline
#   bench/gpu.sh kernels    # bandwidth of every kernel, host time of a call, copies over the bus
#   bench/gpu.sh reasons    # the counters behind a kernel's speed, where Nsight Compute (ncu) is installed
#   bench/gpu.sh            # all of them, up to the first wrong result
#   bench/gpu.sh --dry-run  # the same on CPU, with tiny sizes and a stand-in for ncu
#
# A part that is started again goes on where it was interrupted: what it has measured with the same sources on the same
# card is kept in runs/gpu (--keep=DIR). Each prints one table, which goes to bench/results (--results=DIR); a dry run's
# goes to a temporary folder. --only=NAME runs the steps whose names begin so.
#
# Exit code: 0; 1 for a wrong result; 2 for a command line or a machine that cannot be used; 3 if something was not
# measured in time: start it again.
#
#   PYTHON=python3.12 bench/gpu.sh bits
#   WHEELS=folder bench/gpu.sh bits   # installs what the machine lacks from wheels, without a network; pytest, say
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3}
part_seconds=360

parts=()
flags=()
for word in "$@"; do
    case $word in
        bits | offload | engine | kernels | reasons) parts+=("$word") ;;
        --*) flags+=("$word") ;;
        *)
            echo "unknown part $word; expected bits, offload, engine, kernels, reasons, or none of them for all" >&2
            exit 2
            ;;
    esac
done
((${#parts[@]})) || parts=(bits offload engine kernels reasons)

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
    # The part itself ends earlier, with a table; this is for one that hangs. Installing counts.
    timeout -k 5 $((part_seconds - SECONDS)) "$python" -m bench.gpu "$part" "${flags[@]}" || status=$?
    ((status == 124)) && status=3
    ((status == 0)) || worst=$status
    # What is wrong need not be fast.
    ((status == 0 || status == 3)) || break
    SECONDS=0
done
exit "$worst"
