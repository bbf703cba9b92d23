#!/usr/bin/env bash
# Compares live with transformers: makes the golden values anew, with the installed versions and in an environment of
# its own (some 2 GB), and runs the tests that use them. Five minutes once that is installed; called by `make test-parity`.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
environment=$here/.venv
fresh=$root/build/parity
stamp=$environment/requirements.installed

if ! cmp -s "$here/requirements.txt" "$stamp"; then
    "${PYTHON:-python3}" -m venv "$environment"
    "$environment/bin/python" -m pip --disable-pip-version-check install -q -r "$here/requirements.txt"
    cp "$here/requirements.txt" "$stamp"
fi

mkdir -p "$fresh"
"$environment/bin/python" "$here/make_tiny.py" --out "$fresh/tiny.json"
for name in smollm2-135m gemma3-270m; do
    model=$("$root/.venv/bin/legato" pull "$name" | tail -n 1)
    echo "transformers computes $name ..."
    "$environment/bin/python" "$here/make_golden.py" --model "$model" --out "$fresh/$name.json"
done
cd "$root"
LEGATO_GOLDEN=$fresh exec .venv/bin/python -m pytest -s --timeout 3600 tests/exec/test_golden.py
