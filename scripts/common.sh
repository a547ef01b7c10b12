# Sourced by the other scripts: goes to the root of the checkout and finds its virtual environment.

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="${FARFLUNG_VENV:-${VIRTUAL_ENV:-$root/.venv}}"
case "$venv" in /*) ;; *) venv="$PWD/$venv" ;; esac
cd "$root"

say() { printf '%s: %s\n' "${0##*/}" "$*"; }

die() {
    printf '%s: %s\n' "${0##*/}" "$*" >&2
    exit 1
}

# Prints the first Python on PATH that is 3.11 or newer. Each is started: a name on PATH may be an empty shim.
find_python() {
    local candidate
    for candidate in python3.11 python3.12 python3.13 python3.14 python3 python; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    return 1
}

# The environment's tools first on PATH, or a word on how to get one. With --run, one that can only run farflung will do.
use_venv() {
    [ -e "$venv/.farflung-setup" ] || { [ "${1:-}" = --run ] && [ -e "$venv/.farflung-setup-run" ]; } ||
        die "no environment in $venv yet: run scripts/setup (or make setup) first"
    export VIRTUAL_ENV="$venv" PATH="$venv/bin:$PATH"
    unset PYTHONHOME
}
