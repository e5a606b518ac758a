# Sourced by tools/demo and tools/test from the checkout's root: a virtual environment made once, checked in no time after.

# make_environment NAME EXTRA: make ./NAME with this checkout, editable, and its EXTRA, unless it is there and up to date.
make_environment() {
    local name=$1 extra=$2 python="" candidate stamp
    for candidate in "${PYTHON:-}" python3 python3.14 python3.13 python3.12 python3.11; do
        if [ -n "$candidate" ] && "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            python=$candidate
            break
        fi
    done
    if [ -z "$python" ]; then
        echo "$0: Python 3.11 or newer is needed; install it, or name it: PYTHON=/path/to/python3 $0" >&2
        exit 1
    fi
    stamp=$({ "$python" -c 'import sys; print(sys.version)'; echo "$extra"; cat pyproject.toml tools/constraints.txt; } | cksum)
    if [ "$(cat "$name/stamp" 2>/dev/null)" = "$stamp" ]; then
        return
    fi
    echo "making the environment $name (once; a minute or two)" >&2
    rm -rf "$name"
    "$python" -m venv "$name"
    # torch first, by itself: nothing else may pull in another build of it.
    "$name/bin/python" -m pip install -q --disable-pip-version-check "$(grep '^torch==' tools/constraints.txt)"
    "$name/bin/python" -m pip install -q --disable-pip-version-check -c tools/constraints.txt -e ".[$extra]"
    echo "$stamp" > "$name/stamp"
}
