#!/usr/bin/env bash
# Write the installed versions to constraints.txt (torch stays a range: GPU hosts bring their own build).
set -euo pipefail
cd "$(dirname "$0")/.."
{
  echo "# Versions that CI tests together: pip install -c constraints.txt. Regenerate with: make constraints"
  .venv/bin/python -m pip freeze --exclude-editable | grep -viE '^(torch|triton)=='
  echo 'torch>=2.11,<=2.14.1'
} > constraints.txt.tmp
mv constraints.txt.tmp constraints.txt
