#!/usr/bin/env bash
# test_compare.sh - -compare: the same training with two attention backends, side by side. Takes the program's
# path; prints what failed, and at last "compare: N passed, N failed, N skipped". The runs are tiny.
# shellcheck disable=SC2086 # lists of flags are words
set -u
# shellcheck source-path=SCRIPTDIR source=lib.sh
. "$(dirname "$0")/lib.sh"
plot_runs=$(realpath "$(dirname "$0")/../dev/plot_runs.py")
start_tests compare "$@"

small="-threads 1 -layers 2 -heads 2 -channels 32 -ctx 64 -batch 4 -vocab 300 -sample-tokens 10 -eval-tokens 640"
train="-stories 60 $small -steps 6 -eval-every 2 -dropout 0.1"
slow_start='-stories 60000' # after the merges, that many take a while to be tokenized

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
    [ -s both/tokens/data.json ]
    [ ! -e both/naive/tokens/data.json ]
    [ ! -e both/flash/tokens/data.json ]
    holds both/naive/log.jsonl '"kernel":"naive"'
    holds both/flash/log.jsonl '"kernel":"flash"'
    "$program" -evaluate -load both/flash >out 2>err
    "$program" -resume -run both/naive -steps 7 >out 2>err
    grep -q '^step 7/7 ' out
}

# A folder whose tokens are being made is another process's, whoever wants it.
two_at_once() {
    local process how refusals=0
    "$program" -compare naive,flash $train $slow_start -run shared >first 2>first.err &
    process=$!
    until_holds shared/tokens/merges.txt .
    kill -STOP $process # so that it is at it until all have tried
    for how in '-compare flash,naive' '' -resume -force '-tokenize -force'; do
        if [ "${how%% *}" = -tokenize ]; then how="$how -stories 60 -vocab 300"; else how="$how $train"; fi
        refused 1 "run folder 'shared' is in use by another process, number $process;" $how -run shared ||
            refusals=$((refusals + 1))
    done
    kill -CONT $process
    wait $process || say_and_fail "the first: $(cat first.err)"
    [ $refusals = 0 ]
    [ -s shared/tokens/data.json ]
    [ -s shared/compare.json ]
    [ ! -e shared/run.json ]
}

# What a killed start has left is no comparison: the same command begins anew. Of one that a signal ended nothing is left.
ended_before_it_trains() {
    local signal process
    for signal in KILL TERM; do
        "$program" -compare naive,flash $train $slow_start -run early >out 2>err &
        process=$!
        until_holds early/tokens/merges.txt .
        if [ $signal = KILL ]; then
            stops $signal $process 137
            [ -d early ]
            "$program" -compare naive,flash $train -steps 1 -run early >out 2>err
            [ -s early/compare.json ]
            rm -r early
        else
            stops $signal $process 143
            [ ! -e early ]
        fi
    done
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
    assert [row["floor"] for row in evals] == [all["floor"]] * 4, evals
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

# Without matplotlib: one line that says what to install.
plotting_needs_matplotlib() {
    needs_python
    mkdir without
    echo 'raise ModuleNotFoundError("No module named '"'matplotlib'"'")' >without/matplotlib.py
    ends_with 1 env PYTHONPATH=without python3 "$plot_runs" --above-floor curves.png both/naive both/flash
    [ "$(wc -l <err)" = 1 ]
    holds err 'install python3-matplotlib'
}

plots_what_is_above_the_floor() {
    needs_python
    python3 -c 'import matplotlib' 2>err || { echo 'no matplotlib'; exit 77; }
    python3 "$plot_runs" --above-floor curves.png both/naive both/flash
    [ -s curves.png ]
    sed 's/"floor":[0-9.]*/"floor":null/' both/naive/log.jsonl >unknown.jsonl
    ends_with 1 python3 "$plot_runs" --above-floor none.png unknown.jsonl
    holds err 'without a floor'
    python3 "$plot_runs" curves.png unknown.jsonl
}

shards_used_where_they_lie() {
    "$program" -compare flash,naive -data 'both/tokens/train-*.bin' -heldout 'both/tokens/heldout-*.bin' \
        $small -steps 2 -run shards >out 2>err
    [ ! -e shards/tokens ]
    [ -s shards/compare.json ]
    grep -q '^held-out loss, nats/token  *flash  *naive  *difference$' out
}

minutes_for_each() {
    "$program" -compare naive,flash -stories 60 $small -minutes 0.02 >out 2>err
    local made=(runs/compare-*)
    [ ${#made[@]} = 1 ]
    [ -d "${made[0]}/naive" ]
    [ -d "${made[0]}/flash" ]
    [ -s "${made[0]}/compare.json" ]
    # Losses of different steps have no difference.
    lacks out '^  step [0-9]*, [0-9]* .*e[-+]'
    # A comparison is not taken for the newest run.
    refused 1 'no run under' -generate
}

# The table of a context this long is larger than any machine's memory: told with numbers, before anything is
# made.
none_that_fits() {
    refused 1 'naive: not enough memory: the run needs .*, free are .*flash it would need' \
        -compare naive $train -ctx 4000000 -run never
    [ ! -e never ]
}

# The words of few stories make fewer tokens than are asked for; the runs have what there are.
fewer_tokens_than_asked_for() {
    local vocab
    "$program" -compare naive,flash $train -vocab 5000 -steps 1 -run few >out 2>err
    vocab=$(($(grep -vc '^#version' few/tokens/merges.txt) + 257))
    ((vocab < 5000))
    holds few/naive/run.json "\"vocab\": $vocab,"
    holds few/flash/run.json "\"vocab\": $vocab,"
    refused 2 "-vocab 5000: the tokenizer few/tokens/merges.txt has $vocab tokens; leave the flag out" \
        -compare naive,flash $train -vocab 5000 -data 'few/tokens/train-*.bin' -heldout 'few/tokens/heldout-*.bin' -run never
    [ ! -e never ]
}

one_that_cannot_run() {
    "$program" -compare flash,naive $train -channels 24 -steps 1 -run one >out 2>err # heads of 12 channels
    [ "$(grep -c '^flash: attention flash cannot run this shape: ' out)" = 2 ] # before the training, and at the end
    [ ! -e one/flash ]
    holds out '^  step 1  *-  *[0-9.]*$'
}

a_crash_ends_one_alone() {
    "$program" -compare naive,flash $train -steps 100000 -eval-every 0 -run crash >out 2>err &
    local process=$!
    until_step crash/naive 3
    kill -KILL "$(cat crash/naive/lock)"
    until_step crash/flash 3
    stops INT $process 1
    holds out '^naive: was ended by signal 9'
    holds out '^flash: .*exit code 130: SIGINT'
    grep -q 'error: -compare: naive was ended by signal 9' err
    [ -n "$(newest crash/flash)" ]
}

a_signal_saves_and_ends() {
    "$program" -compare naive,flash $train -steps 100000 -eval-every 0 -run stopped >out 2>err &
    until_step stopped/naive 3
    stops TERM $! 143
    lacks err error
    [ -n "$(newest stopped/naive)" ]
    [ ! -e stopped/flash ]
    holds out '^flash: did not begin'
    [ -s stopped/compare.json ]
}

# What the runs share is no left-over, also where they were moved elsewhere.
shared_tokens_stay() {
    "$program" -compare naive,flash $train -run abandoned >out 2>err
    rm -r abandoned/naive abandoned/flash abandoned/compare.json
    cp -r abandoned/tokens abandoned-before
    refused 1 'not empty and is no run' $train -run abandoned
    diff -r abandoned/tokens abandoned-before
}

# However this process ends, the one that it has started ends too: at two signals at once, and when it is killed.
nobody_is_left() { # NAME SIGNAL...
    local run=left-$1 signal process child
    shift
    "$program" -compare naive,flash $train -steps 100000 -eval-every 0 -run "$run" >out 2>err &
    process=$!
    until_step "$run/naive" 3
    child=$(cat "$run/naive/lock")
    kill -0 "$child"
    for signal in "$@"; do kill "-$signal" $process; done
    wait $process || true
    for _ in $(seq 100); do
        kill -0 "$child" 2>/dev/null || break
        sleep 0.1
    done
    if kill -0 "$child" 2>/dev/null; then say_and_fail "process $child is still there"; fi
    [ -n "$(newest "$run/naive")" ]
}

# A terminal that stops what writes to it from the background (stty tostop) stops none of the trainings.
a_strict_terminal() {
    needs_python
    python3 - "$program" -compare naive,flash $train -run strict <<'PYTHON'
import os, pty, signal, sys, termios

process, terminal = pty.fork()
if process == 0:
    mode = termios.tcgetattr(1)
    mode[3] |= termios.TOSTOP
    termios.tcsetattr(1, termios.TCSANOW, mode)
    os.execv(sys.argv[1], sys.argv[1:])
signal.signal(signal.SIGALRM, lambda *_: (os.kill(process, signal.SIGKILL), sys.exit("it hangs")))
signal.alarm(60)
try:
    while os.read(terminal, 65536):
        pass
except OSError:
    pass  # the end of what was written
sys.exit(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))
PYTHON
    [ -s strict/compare.json ]
}

# Each run has the flags as they were typed, but for -compare; a value that begins with dashes is one.
flags_of_each() {
    "$program" --compare=naive,flash $train -steps 1 -run flags -prompt ---compare -keep 1 >out 2>err
    grep -q '"prompt": "---compare"' flags/naive/run.json
    grep -q '"keep": 1' flags/flash/run.json
}
# What follows a comparison's end is a pipe; whatever else the variable holds ends nothing.
no_pipe() {
    for value in x 0 2 9 77777777777; do
        TRAIN_GPT_COMPARE_PIPE=$value "$program" $train -steps 1 -run "pipe-$value" </dev/null >out 2>err
    done
}

wrong_usage() {
    refused 2 'leave -attention out' -compare naive,flash -attention naive
    refused 2 'expected names' -compare naive,,flash
    refused 2 'expected names' -compare '../x'
    refused 2 'twice' -compare flash,flash
    refused 2 'there are: ' -compare flash,flash_
    refused 2 'no attention backend named nothing' -compare flash,nothing
    refused 2 'needs a value' -compare
    refused 2 'give one of them' -compare naive,flash -generate
    refused 2 'leave -resume' -compare naive,flash -resume
    refused 2 '-heads' -compare naive,flash -channels 30 -heads 4
    refused 1 'no file or folder' -compare naive,flash -data nowhere.txt
    : >empty.txt
    refused 1 'empty' -compare naive,flash -data empty.txt -run emptied
    [ ! -e emptied ]
    mkdir given
    refused 1 'empty' -compare naive,flash -data empty.txt -run given
    [ -d given ] # it was the user's
    refused 1 'not empty' -compare naive,flash $train -run both
}

for test in two_backends two_at_once ended_before_it_trains json_tells_the_same plotting_needs_matplotlib \
    plots_what_is_above_the_floor shards_used_where_they_lie minutes_for_each none_that_fits \
    fewer_tokens_than_asked_for one_that_cannot_run a_crash_ends_one_alone a_signal_saves_and_ends a_strict_terminal \
    flags_of_each no_pipe shared_tokens_stay wrong_usage; do
    run_test $test
done
run_test nobody_is_left signals INT TERM
run_test nobody_is_left killed KILL
finish
