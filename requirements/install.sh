#!/usr/bin/env bash
# Installs the locked packages and this project into .venv. Called by `make setup`; quick when nothing changed.
#
#   requirements/install.sh cpu|gpu [dev]
#   VENV=.venv-peers requirements/install.sh peers      what `make bench` compares with, without this project
#
# uv does the work (15 s where pip takes minutes) but reads no pip configuration, so a wheel folder that pip knows is passed on.
# torch==2.13.0+cpu is not on PyPI: it comes from such a folder, or else from PyTorch's own index for CPU builds.
set -euo pipefail
cd "$(dirname "$0")/.."

device=${1:?cpu, gpu or peers}
locks=("requirements/$device.txt")
[ "${2:-}" = dev ] && locks+=(requirements/dev.txt)
venv=${VENV:-.venv}
python=${PYTHON:-python3}
stamp=$venv/.tokenline-installed

fail() { echo "setup: $*" >&2; exit 1; }

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null ||
    fail "needs Python 3.11 or newer, and '$python' is not; name one with: make setup PYTHON=/path/to/python3.11"

wanted=$(cat "${locks[@]}" pyproject.toml requirements/install.sh | sha256sum; pwd)
if [ -x "$venv/bin/python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
    exit 0
fi

echo "setup: installing $(cat "${locks[@]}" | grep -c '==') locked packages into $venv (under a minute with a quick network)"
rm -f "$stamp"
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv" ||
    fail "could not create the virtual environment $venv (on Debian: apt-get install python3-venv)"
uv_pin=$(grep -m1 '^uv==' "requirements/$device.txt")
"$venv/bin/python" -c "import importlib.metadata as m, sys; sys.exit('uv==' + m.version('uv') != '$uv_pin')" 2>/dev/null ||
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$uv_pin" ||
    fail "pip could not install $uv_pin: is a package index reachable?"

uv() { "$venv/bin/uv" "$@" --python "$venv/bin/python" --quiet; }

# Every wheel folder pip is configured with, whatever the section or variable that names it.
folders=()
while read -r folder; do
    [ -n "$folder" ] && folders+=(--find-links "$folder")
done < <("$venv/bin/python" -m pip config list 2>/dev/null | sed -n "s/^[^=]*find-links='\(.*\)'\$/\1/p" | tr ' ' '\n' | sed 's/\\n/\n/g' | sort -u)

log=$(mktemp)
trap 'rm -f "$log"' EXIT
# Sync, not install: what an older lock file brought and this one does not is removed.
# Compiled at once: three processes import vLLM at every start, which takes minutes from source and seconds from bytecode.
sync_locks() { uv pip sync --compile-bytecode "${locks[@]}" "$@" 2>"$log"; }
if [ "$device" != gpu ]; then
    { [ ${#folders[@]} -gt 0 ] && sync_locks "${folders[@]}"; } || sync_locks --torch-backend cpu || {
        cat "$log" >&2
        fail "could not install the locked packages: torch==2.13.0+cpu was sought in the wheel folders pip knows" \
            "(${folders[*]:-none}) and on PyTorch's CPU index; see the error above, and name a folder that holds it with PIP_FIND_LINKS=/folder"
    }
else
    sync_locks "${folders[@]}" || { cat "$log" >&2; fail "could not install the locked packages; see the error above"; }
fi
[ "$device" = peers ] || uv pip install --no-deps --no-build-isolation --editable . 2>"$log" || { cat "$log" >&2; fail "could not install this project"; }
printf '%s\n' "$device" >"$venv/.tokenline-device"  # what the Makefile's later targets keep to
printf '%s' "$wanted" > "$stamp"
echo "setup: done"
