# Sourced by tools/demo and tools/test, in the checkout's root: makes a virtual environment of the checkout, once.
# Needs Python 3.11 or newer and nothing else.

# The first interpreter on the path that is new enough and can make environments.
find_python() {
  local name
  for name in ${PYTHON:-} python3 python3.14 python3.13 python3.12 python3.11 python; do
    if command -v "$name" >/dev/null && "$name" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      command -v "$name"
      return
    fi
  done
  echo "needs Python 3.11 or newer with its venv module (Debian: apt-get install python3-venv); PYTHON=... names one" >&2
  return 1
}

# make_environment DIRECTORY EXTRAS: installs the checkout, editable, with these extras (with commas) into DIRECTORY.
# Does nothing where that was done for the same pyproject.toml, constraints and extras.
make_environment() {
  local directory=$1 extras=$2 python wanted
  wanted=$(cat pyproject.toml tools/constraints.txt - <<<"$extras $PWD" | cksum)
  if [ "$(cat "$directory/stamp" 2>/dev/null)" = "$wanted" ]; then
    return
  fi
  python=$(find_python)
  echo "making $directory: a few minutes, once" >&2
  rm -f "$directory/stamp"
  "$python" -m venv --clear "$directory"
  "$directory/bin/python" -m pip install -q --disable-pip-version-check -c tools/constraints.txt -e ".[$extras]"
  # Last, so that an installation that was interrupted is done again.
  echo "$wanted" >"$directory/stamp"
}

# make_engine_environment DIRECTORY PINNED: installs the checkout, editable, and an engine into DIRECTORY: exactly what
# PINNED lists, whatever else its packages ask for; only torch brings what it needs.
make_engine_environment() {
  local directory=$1 pinned=$2 python wanted
  wanted=$(cat pyproject.toml "$pinned" - <<<"$PWD" | cksum)
  if [ "$(cat "$directory/stamp" 2>/dev/null)" = "$wanted" ]; then
    return
  fi
  python=$(find_python)
  echo "making $directory: a few minutes and some GB, once" >&2
  rm -f "$directory/stamp"
  "$python" -m venv --clear "$directory"
  "$directory/bin/python" -m pip install -q --disable-pip-version-check "$(grep '^torch==' "$pinned")"
  "$directory/bin/python" -m pip install -q --disable-pip-version-check --no-deps -r "$pinned" -e .
  echo "$wanted" >"$directory/stamp"
}
