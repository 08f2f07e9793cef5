#!/usr/bin/env bash
# test_compare.sh - -compare: the same training with two attention backends, side by side. Takes the program's
# path; prints what failed, and at last "compare: N passed, N failed, N skipped". The runs are tiny.
set -u
program=$(realpath "${1:?usage: test_compare.sh PROGRAM}")
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
cd "$tmp" || exit 1
unset OMP_NUM_THREADS
passed=0 failed=0 skipped=0

run_test() {
    (set -e; "$1") >"$tmp/output" 2>&1
    case $? in
    0) passed=$((passed + 1)) ;;
    77) skipped=$((skipped + 1)); echo "  skipped $1: $(tail -n 1 "$tmp/output")" ;;
    *) failed=$((failed + 1)); echo "  FAILED $1"; tail -n 12 "$tmp/output" | sed 's/^/    /' ;;
    esac
}

say_and_fail() { echo "$*"; return 1; }
needs_python() { command -v python3 >/dev/null || { echo "no python3"; exit 77; }; }

# fails CODE WORDS ARGUMENT...: ends with that code, and the last line of stderr is an error with the words.
fails() {
    local code=$1 words=$2 status=0
    shift 2
    "$program" "$@" </dev/null >out 2>err || status=$?
    [ $status = "$code" ] || say_and_fail "$*: exit code $status, expected $code: $(cat err)"
    tail -n 1 err | grep -q -e "^train_gpt: error: .*$words" || say_and_fail "$*: no '$words' in: $(cat err)"
}

small="-threads 1 -layers 2 -heads 2 -channels 32 -ctx 64 -batch 4 -vocab 300 -sample-tokens 10 -eval-tokens 640"
train="-stories 60 $small -steps 6 -eval-every 2 -dropout 0.1"

two_backends() {
    "$program" -compare naive,flash $train -run both >out 2>err
    [ ! -s err ] || say_and_fail "stderr: $(cat err)"
    grep -q '^held-out loss, nats/token  *naive  *flash  *difference$' out
    [ "$(grep -c '^  step [0246]  ' out)" = 4 ]
    grep -q '^  floor ' out # built-in stories: it is known
    for figure in tokens/s 'ms in attention, forward' 'ms in attention, backward' 'MB that attention keeps' \
        'MB at the peak'; do
        grep -q "^  $figure  *[0-9.]\+  *[0-9.]\+\$" out || say_and_fail "no $figure: $(tail -n 20 out)"
    done
    # The tokens are made once; each run is one like any other.
    [ -s both/tokens/data.json ] && [ ! -e both/naive/tokens/data.json ] && [ ! -e both/flash/tokens/data.json ]
    grep -q '"kernel":"naive"' both/naive/log.jsonl && grep -q '"kernel":"flash"' both/flash/log.jsonl
    "$program" -evaluate -load both/flash >out 2>err
    "$program" -resume -run both/naive -steps 7 >out 2>err
    grep -q '^step 7/7 ' out
}

# Rounding of fp32 (2^-24 of a loss near 6 is 4e-7) early, before steps have carried it on; 0.01 at the end.
json_tells_the_same() {
    needs_python
    python3 - <<'PYTHON'
import json
all = json.load(open("both/compare.json"))
naive, flash = all["backends"]
assert all["floor"] > 0 and naive["name"] == "naive" and flash["name"] == "flash", all
for one in naive, flash:
    assert one["problem"] is None and one["run"] == one["name"] and one["steps"] == 6, one
    log = [json.loads(line) for line in open("both/%s/log.jsonl" % one["name"])]
    evals = [row for row in log if row["type"] == "eval" and row["step"] <= 6]
    assert [e["loss"] for e in one["evals"]] == [e["loss"] for e in evals]
    assert [e["step"] for e in one["evals"]] == [0, 2, 4, 6]
    assert 0 < one["attention_forward_ms"] + one["attention_backward_ms"] < one["ms"], one
    assert one["tokens_per_s"] > 0 and one["peak_memory_bytes"] > 1e6 and one["micro"] == 4, one
# 2 layers, 4 sequences, 2 heads, a table of 64 x 64 floats
assert naive["attention_saved_bytes"] == 2 * 4 * 2 * 64 * 64 * 4 and flash["attention_saved_bytes"] == 0
assert all["backends"][0]["evals"][3]["difference"] == 0
for a, b in zip(naive["evals"], flash["evals"]):
    assert b["difference"] == b["loss"] - a["loss"], (a, b)
    assert abs(b["difference"]) < (1e-6 if a["step"] <= 2 else 0.01), (a, b)
PYTHON
}

shards_used_where_they_lie() {
    "$program" -compare flash,naive -data 'both/tokens/train-*.bin' -heldout 'both/tokens/heldout-*.bin' \
        $small -steps 2 -run shards >out 2>err
    [ ! -e shards/tokens ] && [ -s shards/compare.json ]
    grep -q '^held-out loss, nats/token  *flash  *naive  *difference$' out
}

minutes_for_each() {
    "$program" -compare naive,flash -stories 60 $small -minutes 0.02 >out 2>err
    [ "$(ls -d runs/compare-*/naive runs/compare-*/flash | wc -l)" = 2 ]
    [ -s runs/compare-*/compare.json ]
    # A comparison is not taken for the newest run.
    fails 1 'no run under' -generate
}

# The table of a context this long is larger than any machine's memory: told with numbers, before anything is
# made.
none_that_fits() {
    fails 1 'naive: not enough memory: the run needs .*, free are .*flash it would need' \
        -compare naive $train -ctx 4000000 -run never
    [ ! -e never ]
}

one_that_cannot_run() {
    "$program" -compare flash,naive $train -channels 24 -steps 1 -run one >out 2>err # heads of 12 channels
    [ "$(grep -c '^flash: attention flash cannot run this shape: ' out)" = 2 ] # before the training, and at the end
    [ ! -e one/flash ] && grep -q '^  step 1  *-  *[0-9.]*$' out
}

a_crash_ends_one_alone() {
    "$program" -compare naive,flash $train -steps 100000 -eval-every 0 -run crash >out 2>err &
    local process=$! status=0
    for _ in $(seq 600); do grep -qs '"step":3,' crash/naive/log.jsonl && break; sleep 0.05; done
    kill -KILL "$(cat crash/naive/lock)"
    for _ in $(seq 600); do grep -qs '"step":3,' crash/flash/log.jsonl && break; sleep 0.05; done
    kill -INT $process
    wait $process || status=$?
    [ $status = 1 ] || say_and_fail "exit code $status: $(cat err)"
    grep -q '^naive: was ended by signal 9' out && grep -q '^flash: .*exit code 130: SIGINT' out
    grep -q 'error: -compare: naive was ended by signal 9' err
    ls crash/flash/checkpoints | grep -q step
}

a_signal_saves_and_ends() {
    "$program" -compare naive,flash $train -steps 100000 -eval-every 0 -run stopped >out 2>err &
    local process=$! status=0
    for _ in $(seq 600); do grep -qs '"step":3,' stopped/naive/log.jsonl && break; sleep 0.05; done
    kill -TERM $process
    wait $process || status=$?
    [ $status = 143 ] || say_and_fail "exit code $status: $(cat err)"
    ! grep -q error err
    ls stopped/naive/checkpoints | grep -q step
    [ ! -e stopped/flash ] && grep -q '^flash: did not begin' out && [ -s stopped/compare.json ]
}

wrong_usage() {
    fails 2 'expected names' -compare naive,,flash
    fails 2 'expected names' -compare '../x'
    fails 2 'twice' -compare flash,flash
    fails 2 'there are: ' -compare flash,flash_
    fails 2 'no attention backend named nothing' -compare flash,nothing
    fails 2 'needs a value' -compare
    fails 2 'give one of them' -compare naive,flash -generate
    fails 2 'leave -resume' -compare naive,flash -resume
    fails 2 '-heads' -compare naive,flash -channels 30 -heads 4
    fails 1 'no file or folder' -compare naive,flash -data nowhere.txt
    : >empty.txt
    fails 1 'empty' -compare naive,flash -data empty.txt -run emptied
    [ ! -e emptied ]
    fails 1 'not empty' -compare naive,flash $train -run both
}

for test in two_backends json_tells_the_same shards_used_where_they_lie minutes_for_each none_that_fits \
    one_that_cannot_run a_crash_ends_one_alone a_signal_saves_and_ends wrong_usage; do
    run_test $test
done
echo "compare: $passed passed, $failed failed, $skipped skipped"
[ $failed = 0 ]
