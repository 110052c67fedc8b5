#!/usr/bin/env bash
# Resolves requirements/*.in into the pinned *.txt. Called by `make lock`; UV names another uv than the environment's.
set -euo pipefail
cd "$(dirname "$0")"
uv=${UV:-../${VENV:-.venv}/bin/uv}
folders=()
while read -r folder; do
    [ -n "$folder" ] && folders+=(--find-links "$folder")
done < <(python3 -m pip config list 2>/dev/null | sed -n "s/^[^=]*find-links='\(.*\)'\$/\1/p" | tr ' ' '\n' | sort -u)
resolve() {
    "$uv" pip compile "$1.in" -o "$1.txt" --quiet --no-annotate --custom-compile-command "make lock" \
        --python-version 3.11 --python-platform x86_64-manylinux_2_28 "${@:2}"
}
resolve cpu --override overrides.txt "${folders[@]:---torch-backend=cpu}"
resolve gpu --override overrides-gpu.txt
resolve dev "${folders[@]:---torch-backend=cpu}"
resolve peers --override overrides.txt "${folders[@]:---torch-backend=cpu}"
