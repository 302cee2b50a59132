#!/usr/bin/env bash
# Makes .venv with gnnpipe in it, or finds that it is there:   bash scripts/setup.sh [run|dev]
#
# A stamp says what .venv was made from (pyproject.toml, constraints.txt, this folder, the Python).
# Same stamp: nothing to do. Another one, as after an interrupted set-up: start anew, for a half-made
# environment is found out late and by odd errors. A .venv without a stamp is left alone.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
kind=${1:-run}
venv=.venv

say() { printf 'setup: %s\n' "$*" >&2; }
stop() { say "$*"; exit 1; }

case "$kind" in
  run) what=. ;;
  dev) what='.[dev]' ;;
  *) stop "unknown kind '$kind'; try run or dev" ;;
esac

python=""
for candidate in ${PYTHON:-python3 python3.11 python3.12 python3.13 python}; do
  if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    python=$candidate
    break
  fi
done
if [ -z "$python" ]; then
  found=$("${PYTHON:-python3}" --version 2>/dev/null) || found=
  stop "needs Python 3.11 or newer, found '${found:-none}'; install it, or name it: PYTHON=/path/to/python3.11"
fi
"$python" -c 'import ensurepip, venv' 2>/dev/null ||
  stop "$("$python" --version) has no venv module; install it (Debian, Ubuntu: apt install python3-venv)"

made_from=$("$python" - <<'EOF'
import hashlib, os, sys
parts = [open(name, "rb").read() for name in ("pyproject.toml", "constraints.txt")]
parts += [os.getcwd().encode(), sys.version.encode(), os.path.realpath(sys.executable).encode()]
print(hashlib.sha256(b"\0".join(parts)).hexdigest())
EOF
)
stamp=$venv/gnnpipe-stamp
have=$(cat "$stamp" 2>/dev/null || true)
if [ "$have" = "$made_from dev" ] || [ "$have" = "$made_from $kind" ]; then
  exit 0
fi
if [ -e "$venv" ] && [ ! -e "$stamp" ]; then
  stop "$venv is there, and not made by this script; move it away, or do without make: install with the pip of $venv (pip install -c constraints.txt -e '$what') and start gnnpipe or pytest from it"
fi
if [ "$have" != "$made_from run" ]; then # dev adds to run; anything else is made anew
  say "making $venv with $("$python" --version) (once; a minute or two)"
  rm -rf "$venv"
  mkdir "$venv"
  echo unfinished >"$stamp"
  "$python" -m venv "$venv" || stop "cannot make $venv; see above"
fi
echo unfinished >"$stamp"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check -c constraints.txt -e "$what" ||
  stop "pip could not install gnnpipe; see above, and try again: the set-up starts anew"
printf '%s %s\n' "$made_from" "$kind" >"$stamp"
say "$venv is ready"
