#!/usr/bin/env bash
# Makes sure of the programs that the tests drive: Chromium (headless) and Prometheus. Called by `make tools`; quick when both are there.
#
# What is missing comes from Debian's packages: Chromium is installed, which needs root; of Prometheus only the files are
# unpacked, into the cache folder, so that no system service is started and no root is needed.
set -euo pipefail

# As serve_app/cache.py has it.
cache=${TOKENLINE_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/tokenline}
tools=$cache/tools
log=
trap '[ -z "$log" ] || rm -f "$log"' EXIT

fail() {
    [ -z "$log" ] || tail -n 5 "$log" >&2
    echo "tools: $*" >&2
    exit 1
}

have() { command -v "$1" >/dev/null 2>&1; }

as_root() {
    if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi
}

can_be_root() { [ "$(id -u)" = 0 ] || { have sudo && sudo -n true 2>/dev/null; }; }

# A package list may be missing or old: once more after an update.
with_fresh_lists() {
    "$@" >>"$log" 2>&1 && return
    can_be_root && as_root apt-get update >>"$log" 2>&1 && "$@" >>"$log" 2>&1
}

has_chromium() {
    if [ -n "${TOKENLINE_CHROMIUM:-}" ]; then
        have "$TOKENLINE_CHROMIUM" || fail "TOKENLINE_CHROMIUM=$TOKENLINE_CHROMIUM is not a program that can be started"
        return
    fi
    local name
    for name in chromium-headless-shell chromium chromium-browser google-chrome; do
        have "$name" && return
    done
    return 1
}

get_chromium() {
    local advice="install Chromium (Debian: apt-get install chromium-headless-shell fonts-dejavu-core; elsewhere any Chromium or Chrome),
       or name one with TOKENLINE_CHROMIUM=/path/to/chromium"
    have apt-get || fail "Chromium is missing and this is no Debian: $advice"
    can_be_root || fail "Chromium is missing, and to install it needs root: $advice"
    echo "tools: installing Chromium (chromium-headless-shell, about 250 MB unpacked)"
    with_fresh_lists as_root env DEBIAN_FRONTEND=noninteractive \
        apt-get install -y --no-install-recommends chromium-headless-shell fonts-dejavu-core ||
        fail "apt-get could not install it; $advice"
    has_chromium || fail "chromium-headless-shell is installed and still not on the PATH, $PATH"
}

has_prometheus() { have prometheus || "$tools/prometheus/usr/bin/prometheus" --version >/dev/null 2>&1; }

get_prometheus() {
    local advice="install it (Debian: apt-get install prometheus; elsewhere https://prometheus.io/download),
       so that \`prometheus\` is on the PATH"
    have apt-get && have dpkg-deb || fail "Prometheus is missing and this is no Debian: $advice"
    echo "tools: unpacking Prometheus into $tools/prometheus"
    mkdir -p "$tools" || fail "cannot write to $tools"
    local new
    new=$(mktemp -d "$tools/.prometheus.XXXXXX")
    chmod 755 "$new"
    (cd "$new" && with_fresh_lists apt-get download prometheus && dpkg-deb -x prometheus_*.deb . >>"$log" 2>&1) ||
        { rm -rf "$new"; fail "apt-get could not download it; $advice"; }
    rm -rf "$new"/prometheus_*.deb "$tools/prometheus"
    mv "$new" "$tools/prometheus"
    has_prometheus || fail "the unpacked $tools/prometheus/usr/bin/prometheus does not start; $advice"
}

if has_chromium && has_prometheus; then
    exit 0
fi
log=$(mktemp)
has_chromium || get_chromium
: >"$log"
has_prometheus || get_prometheus
echo "tools: done"
