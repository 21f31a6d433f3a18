#!/bin/sh
# The compiled core under AddressSanitizer and UndefinedBehaviorSanitizer: its tests, and random histories.
# Usage: tests/native/sanitize.sh PYTHON [HISTORIES]. Builds into a copy; the working tree is left alone.
set -eu
python=$1
histories=${2:-60}
root=$(cd "$(dirname "$0")/../.." && pwd)
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
(cd "$root" && tar cf - kvd protocols planner tests setup.py pyproject.toml LICENSE README.md MANIFEST.in) | tar xf - -C "$copy"
rm -f "$copy"/kvd/core/_native.*.so
tools="$copy/tools"
"$python" -m pip install --quiet --disable-pip-version-check --target "$tools" "cython>=3.1" "setuptools>=77"
cd "$copy"
CFLAGS="-O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize=alignment -fno-sanitize-recover=undefined" \
    LDFLAGS="-fsanitize=address,undefined" PYTHONPATH="$tools" "$python" setup.py --quiet build_ext --inplace >/dev/null
test -n "$(find kvd/core -name '_native.*.so')" || { echo "the core was not built"; exit 1; }
export LD_PRELOAD="$(gcc -print-file-name=libasan.so) $(gcc -print-file-name=libubsan.so)"
export PYTHONMALLOC=malloc ASAN_OPTIONS=detect_leaks=0:abort_on_error=1 KVD_CORE=native PYTHONPATH="$copy"
"$python" -m pytest -q -x -p no:cacheprovider -o timeout=1200 -k "not reference and not given_back" \
    tests/core/test_residency.py tests/core/test_groups.py tests/core/test_parity.py tests/native
"$python" -m tests.native.differential --histories "$histories" --steps 200
