#!/usr/bin/env bash
# The demo: train the recipes of sweeps/demo.yaml on this machine and draw the comparison.
set -euo pipefail
cd "$(dirname "$0")/.."
started=$(date +%s)
.venv/bin/lptctl sweep launch sweeps/demo.yaml
.venv/bin/lptctl plot runs/demo
echo "demo: $(($(date +%s) - started)) s after the installation"
