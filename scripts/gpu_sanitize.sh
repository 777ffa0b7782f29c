#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Every kind of kernel under compute-sanitizer, with little enough to do for it to end in minutes:
#   scripts/gpu_sanitize.sh [BUILD [TOOL...]]     BUILD: a CUDA build with its tests (default build/cuda)
#                                                 TOOL: memcheck, racecheck, initcheck (default: all three)
# JOBS=4 at a time, LIMIT=300 seconds each. What they said is left in BUILD/sanitize. Status 0: all of them clean.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
build=${1:-build/cuda}
tools=("${@:2}")
[ ${#tools[@]} -gt 0 ] || tools=(memcheck racecheck initcheck)
limit=${LIMIT:-300}
logs=$build/sanitize
rm -rf "$logs" && mkdir -p "$logs" || exit 1

# check NAME TOOL TEST FILTER THINNING
check() {
  local log=$logs/$1.$2.log start=$SECONDS status outcome
  # A test of ours asks for more memory than there is: that error is of no interest here.
  TREEATTN_TEST_THINNING=$5 timeout "$limit" compute-sanitizer --tool "$2" --error-exitcode 99 --report-api-errors no \
    "$build/tests/$3" --gtest_filter="$4" >"$log" 2>&1
  status=$?
  # A filter that names no test, or a test that is skipped, has shown nothing.
  if ! grep -qE '^\[  PASSED  \] [1-9]' "$log" || grep -q SKIPPED "$log"; then outcome=FAILED; else outcome=clean; fi
  [ $status -eq 0 ] || outcome=FAILED
  [ $status -ne 99 ] || outcome="REPORTS: $(grep SUMMARY "$log" | tail -1)"
  [ $status -ne 124 ] || outcome="not ended in $limit s"
  printf '%-9s %-10s %4d s  %s\n' "$1" "$2" $((SECONDS - start)) "$outcome" | tee -a "$logs/outcomes"
}

while read -r name test filter thinning without; do
  for tool in "${tools[@]}"; do
    if [ "$tool" = "$without" ]; then
      printf '%-9s %-10s         left out, see docs/gpu_notes.md\n' "$name" "$tool"
      continue
    fi
    while [ "$(jobs -rp | wc -l)" -ge "${JOBS:-4}" ]; do wait -n; done
    check "$name" "$tool" "$test" "$filter" "$thinning" </dev/null &
  done
done <<'LIST'
twos     attention_cuda_test  *.ByteHeadsInTwos:*.ByteHeadsDoNotMix               1
limbs    limbs_cuda_test      *.EveryShape/*                                     29
norms    model_ops_cuda_test  *.MapsOfNormalisedRows                              8
cases    attention_cuda_test  *.CaseList                                         24
prompts  prefill_cuda_test    *.EveryShape                                       21
layer    model_ops_cuda_test  *.CallsThatDoSeveralThingsDoThemAlike               8
int8     model_ops_cuda_test  *.Int8WeightsOfEveryKind                            8
linear   model_ops_cuda_test  *.LinearIsWithinItsBound                           29
ops      model_ops_cuda_test  *.RmsNorm:*.Swiglu:*.RopeAtAnyPosition:*.EmbedTakesRowsOfTheTable 1
rows     kv_cuda_test         *.RowsAreConvertedBitForBitAsOnTheHost              1
states   states_cuda_test     *.IdentityMergeAndFinalize                          1
mailbox  device_links_test    *OneLink.OneMailboxForAll/*                         1
exchange device_links_test    *OneLink.TwoKernelsEach/*                           1
peer     device_links_test    *PeerLink.DecodeLoopOnTheDevice/2                   1
ranks    parallel_cuda_test   *VirtualRanks.UnequalSharesAndRanksThatCarryNothing/2 29
llama    llama_cuda_test      *.SmallestModel                                     1
pair     llama_cuda_test      *.SmallestModelOnTwoRanks                           1 initcheck
products llama_cuda_test      *.SmallestModelWithProducts                         1 initcheck
LIST
wait
! grep -qv ' clean$' "$logs/outcomes"
