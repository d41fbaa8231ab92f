#!/usr/bin/env bash
# Make .venv: `tools/make_env.sh engine` for training and plots, `tools/make_env.sh dev` for the tests on top.
# PYTHON picks the interpreter. TORCH overrides the torch requirement, e.g. TORCH='torch==2.11.0' with
# PIP_INDEX_URL or PIP_EXTRA_INDEX_URL pointing to the wheel index of your GPU vendor.
set -euo pipefail
cd "$(dirname "$0")/.."
extra=$1
python=${PYTHON:-python3}
started=$(date +%s)

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
  echo "lptctl needs Python 3.11 or newer; $python is $("$python" --version). Set PYTHON=/path/to/python3.11" >&2
  exit 2
}
if [ ! -x .venv/bin/pip ]; then
  if ! "$python" -c 'import ensurepip' 2>/dev/null; then
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
      apt-get update -q && apt-get install -q -y python3-venv
    else
      echo "$python has no venv module; install it (Debian: apt-get install python3-venv) and run make again" >&2
      exit 2
    fi
  fi
  "$python" -m venv .venv
fi
pip() { .venv/bin/python -m pip --disable-pip-version-check "$@"; }

echo "installing the environment ($extra) into .venv; torch and the rest take a few minutes" >&2
if ! .venv/bin/python -c 'import torch' 2>/dev/null; then
  if [ -n "${TORCH:-}" ]; then
    pip install -q "$TORCH"
  elif [ -e /dev/nvidiactl ] || [ -e /dev/kfd ]; then
    pip install -q torch==2.13.0
  elif ! pip install -q torch==2.13.0+cpu 2>/dev/null; then
    echo "no CPU build of torch 2.13.0 in the configured package index; taking its default build (several GB)." >&2
    echo "To avoid that, set PIP_EXTRA_INDEX_URL to PyTorch's index of CPU wheels." >&2
    pip install -q torch==2.13.0
  fi
fi
# GPU builds of torch bring their own Triton. The CPU build has none; tests run the kernels in its interpreter and compile
# them for GPUs, with the version that the GPU results in docs/ come from.
if [ "$extra" = dev ] && ! .venv/bin/python -c 'import triton' 2>/dev/null; then
  pip install -q triton==3.6.0
fi
case $extra in
  engine) pip install -q -c constraints.txt -e '.[engine]' ;;
  dev) pip install -q -c constraints.txt -e '.[engine,dev]' ;;
  *) echo "usage: tools/make_env.sh engine|dev" >&2; exit 2 ;;
esac
touch ".venv/.$extra"
echo "environment ($extra): $(($(date +%s) - started)) s, $(du -sh .venv | cut -f1), torch $(.venv/bin/python -c 'import torch; print(torch.__version__)')"
