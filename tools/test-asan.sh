#!/usr/bin/env bash
# Builds the CPU kernels with address and undefined-behaviour sanitizers and runs their tests once. Linux with GCC.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON="${PYTHON:-.venv/bin/python}"

REPLAYSTATE_EXTENSION=require REPLAYSTATE_SANITIZE=address,undefined \
    "$PYTHON" setup.py --quiet build_ext --build-lib build/asan --build-temp build/asan-objects

# Python itself is not built with the sanitizer, so its runtime comes first by LD_PRELOAD; Python's own leaks are not ours.
runtime() { "${CXX:-g++}" -print-file-name="$1"; }
export REPLAYSTATE_CPU_KERNELS="$PWD/build/asan/replaystate/_cpu_kernels.so"
export ASAN_OPTIONS=detect_leaks=0:abort_on_error=1 UBSAN_OPTIONS=print_stacktrace=1
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-2}"
LD_PRELOAD="$(runtime libasan.so) $(runtime libubsan.so) $(runtime libstdc++.so.6)" \
    "$PYTHON" -m pytest -q tests/cpu --ignore tests/cpu/test_build.py -p no:cacheprovider "$@"
