#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# ./run and ./test called from elsewhere, by another name and with arguments, in a tree where nothing is built: what they
# would call says where it was called and with what.
set -euo pipefail
source_dir=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
work=$(cd "$(mktemp -d)" && pwd -P)
trap 'rm -rf "$work"' EXIT

tree="$work/a tree"
mkdir -p "$tree/scripts" "$tree/build/release/bin" "$work/bin"
cp "$source_dir/run" "$source_dir/test" "$tree"
printf '#!/bin/sh\n' >"$tree/scripts/deps.sh"
printf '#!/bin/sh\npwd >>"%s/built_in"\n' "$work" >"$work/bin/cmake"
printf '#!/bin/sh\npwd\nprintf "<%%s>" "$@"\n' >"$tree/build/release/bin/treeattn"
chmod +x "$tree/scripts/deps.sh" "$work/bin/cmake" "$tree/build/release/bin/treeattn"
ln -s "$tree" "$work/tree_link"
ln -s "$tree/run" "$work/run_link"
ln -s "$tree/test" "$work/test_link"
export PATH=$work/bin:$PATH
cd /

expect() {
  [ "$2" = "$3" ] || { printf '%s:\n%s\nbut expected:\n%s\n' "$1" "$2" "$3"; exit 1; }
}

# The command is where its caller is. The build is in the tree by its own name, or every link would build all again.
for run in "$tree/run" "$work/tree_link/run" "$work/run_link"; do
  rm -f "$work/built_in"
  expect "$run" "$("$run" generate "two words" '')" "/"$'\n'"<generate><two words><>"
  expect "builds of $run" "$(sort -u "$work/built_in")" "$tree"
done

# Two at once build one after the other.
printf '#!/bin/sh\nmkdir "%s" || exit 1\nsleep 0.1\nrmdir "%s"\n' "$work/busy" "$work/busy" >"$work/bin/cmake"
"$tree/run" first >"$work/first" 2>&1 &
"$tree/run" second >"$work/second" 2>&1 || { cat "$work/second"; exit 1; }
wait $! || { cat "$work/first"; exit 1; }

# What may not be written is run as it was built. That root may not, only others can show.
as_other=()
[ "$(id -u)" -ne 0 ] || as_other=(setpriv --reuid 65534 --regid 65534 --clear-groups)
chmod 755 "$work"
chmod a-w "$tree/build/release"
expect "./run of another user" "$("${as_other[@]}" "$tree/run" generate)" "/"$'\n'"<generate>"
chmod u+w "$tree/build/release"

# Nobody who asks what ./test does wants it to begin.
rm -f "$work/built_in"
for help in -h --help; do
  "$work/test_link" $help | grep -q TREEATTN_JOBS
done
status=0
complaint=$("$work/test_link" release 2>&1) || status=$?
expect "./test release" "$status: $complaint" "2: test: unknown argument 'release'; accepted: none, or --help"
[ ! -e "$work/built_in" ]
