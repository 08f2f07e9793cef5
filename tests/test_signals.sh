#!/usr/bin/env bash
# test_signals.sh - one SIGINT, SIGTERM or SIGUSR1 ends a run within a step, saved, with exit code 130, 143 or 138,
# whatever the run is at: such a signal comes at each system call of a run from its text to its end, and in the
# middle of each phase that makes none. Two end it at once. What is left goes on, or starts again, to the same end.
# A closed terminal, pipe or standard stream ends nothing. Takes the program's path, beside which
# tests/crash_shim.so and tests/faulty_train_gpt were built; at last "signals: N passed, N failed, N skipped".
# SIGNALS_EVERY=n tries every n-th call only (1: all of them).
# shellcheck disable=SC2086 # lists of flags are words
set -u
program=$(realpath "${1:?usage: test_signals.sh PROGRAM}")
built=$(dirname "$program")/tests
shim=$built/crash_shim.so faulty=$built/faulty_train_gpt
every=${SIGNALS_EVERY:-4}
export ASAN_OPTIONS=verify_asan_link_order=0${ASAN_OPTIONS:+:$ASAN_OPTIONS}
unset OMP_NUM_THREADS
[[ -w /dev/shm ]] && export TMPDIR=/dev/shm
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
cd "$tmp" || exit 1
passed=0 failed=0 skipped=0

skip() { skipped=$((skipped + 1)); echo "  skipped $1: $2"; }
run_test() { # NAME FUNCTION ARGUMENT...
    local name=$1 status
    shift
    rm -rf run world world.trace
    (set -e; "$@") > output 2>&1
    status=$? # a condition would switch -e off
    case $status in
    0) passed=$((passed + 1)) ;;
    77) skip "$name" "$(tail -n 1 output)" ;;
    *)
        failed=$((failed + 1))
        echo "  FAILED $name"
        tail -n 12 output | sed 's/^/    /'
        ;;
    esac
}
ends_with() { # CODE COMMAND...
    local expected=$1 status=0
    shift
    "$@" > out 2> err || status=$?
    ((status == expected)) || { echo "exit code $status, expected $expected: $(tail -n 1 err)"; return 1; }
}
holds() { grep -q -e "$2" "$1" || { echo "no '$2' in: $(cat "$1")"; return 1; }; }
code_of() { case $1 in INT*) echo 130 ;; TERM*) echo 143 ;; *) echo 138 ;; esac; }
rows() { grep -E '"type":"(step|eval|sample)"' "$1/log.jsonl" | sed 's/,"ms".*"tokens"/,"tokens"/'; }
last=checkpoints/step-00000004
is_same() {
    cmp "reference/$last/model.safetensors" "$1/$last/model.safetensors" &&
        cmp "reference/$last/optimizer.safetensors" "$1/$last/optimizer.safetensors" &&
        diff <(rows reference) <(rows "$1")
}

mkdir text
for i in $(seq 20); do printf 'Anna had %d hats. Ben lost it\n' "$i" > "text/$i.txt"; done
# The steps are in no flag here: they come first or last.
small="-vocab 260 -device cpu -threads 1 -layers 1 -heads 2 -channels 16 -ctx 16 -batch 2 -dropout 0.1 -eval-every 2
    -eval-tokens 32 -sample-every 2 -samples 1 -sample-tokens 4 -checkpoint-every 2"
ends_with 0 "$program" $small -data text -steps 4 -run reference || { cat err; exit 1; }

# ---- at each system call ----
# The text lies in the folder that is watched, so that its reading is among the calls. The leak checker makes calls
# where none can be trapped.
watched() { # WORLD AT HOW
    CRASH_FOLDER=$tmp/$1 CRASH_TRACE=$tmp/$1.trace CRASH_AT=$2 CRASH_HOW=$3 LD_PRELOAD=$shim \
        ASAN_OPTIONS=$ASAN_OPTIONS:detect_leaks=0 "$program" $small -data "$tmp/$1/text" -steps 4 -run "$tmp/$1/run"
}
signal_at() { # WORLD CALL SIGNAL
    local status=0
    rm -rf "$1" "$1.trace"
    mkdir "$1" && cp -r text "$1/" || return
    watched "$1" "$2" "$3" > "$1.out" 2> "$1.err" || status=$?
    # What is left to a run that is done when the signal comes is to say so.
    if ((status == 0)) && tail -n 1 "$1/run/log.jsonl" | grep -q '"reason":"done"'; then echo at-the-end >> "$1.seen"
    elif ((status != $(code_of "$3"))); then
        echo "exit code $status: $(tail -n 1 "$1.err")"
        return 1
    elif [[ -e $1/run/log.jsonl ]]; then
        # Saved, as far as it got; within a step.
        echo "after step $(sed -n 's/.*stopped by SIG[A-Z0-9]* after step \([0-9]*\).*/\1/p' "$1.out")" >> "$1.seen"
        grep '"type":"step"' "$1/run/log.jsonl" | sed -n '$s/.*"step":\([0-9]*\),.*/\1/p' > "$1.step"
        if [[ -s $1.step ]] && [[ ! -d $1/run/checkpoints/step-0000000$(cat "$1.step") ]]; then
            echo "step $(cat "$1.step") is not saved"
            return 1
        fi
    else
        [[ $(wc -l < "$1.err") == 1 ]] || { cat "$1.err"; return 1; }
        sed 's/^train_gpt: error: //; s/ after.*//; s/,.*//' "$1.err" >> "$1.seen"
    fi
    # Gone on with, or begun again, by the same command.
    "$program" $small -data "$tmp/$1/text" -steps 4 -run "$tmp/$1/run" -resume > "$1.out" 2> "$1.err" ||
        { cat "$1.err"; return 1; }
    [[ ! -s $1.err ]] || { cat "$1.err"; return 1; }
    is_same "$1/run"
}
each_call() {
    local calls worker n signals=(INT TERM USR1)
    mkdir world
    cp -r text world
    ends_with 0 watched world 0 INT
    calls=$(wc -l < world.trace)
    ((calls > 300)) || { echo "only $calls calls"; return 1; }
    # Two at a time, each in a world of its own.
    for worker in 0 1; do
        for ((n = 1 + worker * every; n <= calls; n += 2 * every)); do
            if signal_at world$worker $n "${signals[n / every % 3]}" > tried.$worker 2>&1; then
                echo passed >> each_call.$worker
            else
                echo "call $n, $(sed -n "${n}s,.*$tmp/,,p" world$worker.trace): $(head -n 3 tried.$worker)"
            fi
        done > results.$worker &
    done
    wait
    cat results.0 results.1
    sort world[01].seen | uniq -c > seen
    [[ ! -s results.0 && ! -s results.1 ]]
    # Hardly any came too late.
    (($(cat world[01].seen | grep -c at-the-end) * 10 * every < calls))
    # Each phase that makes calls was among them.
    for phase in 'stopped while reading ' 'stopped while reading words' 'stopped while encoding' \
        'after step 0' 'after step 2' 'after step 4'; do
        ((every > 4)) || holds seen "$phase"
    done
}
status=0
if [[ -e $shim ]]; then
    mkdir world && cp -r text world/ && { watched world 0 INT > out 2> err || status=$?; }
fi
if [[ ! -e $shim ]]; then
    skip 'a signal at each call' "there is no $shim (make test builds it on Linux)"
elif ((status == 77)); then
    skip 'a signal at each call' 'this system has no seccomp filters'
else
    run_test 'a signal at each call' each_call
    passed=$((passed + $(cat each_call.[01] | wc -l)))
fi
two_at_a_call() { # SIGNAL WORDS-OF-CALL
    local n
    mkdir world
    cp -r text world
    watched world 0 INT > out 2> err
    n=$(sed -n "s,^\([0-9]*\) $2.*,\1,p" world.trace | head -n 1)
    rm -r world
    mkdir world
    cp -r text world
    ends_with "$(code_of "$1")" watched world "$n" "$1*2"
    [[ ! -e world/run/log.jsonl ]] || ! grep -q '"type":"end"' world/run/log.jsonl # nothing more was done
    ends_with 0 "$program" $small -data "$tmp/world/text" -steps 4 -run world/run -resume
    is_same world/run
}
if [[ -e $shim ]] && ((status != 77)); then
    run_test 'two signals while reading' two_at_a_call INT "read .*/text/7.txt"
    run_test 'two signals while writing tokens' two_at_a_call TERM "write .*/heldout-00000"
    run_test 'two signals while saving' two_at_a_call USR1 "write .*/optimizer.safetensors"
fi

# ---- in the middle of what makes no calls ----
in_a_phase() { # SIGNAL PLACE STEP
    ends_with "$(code_of "$1")" env FAULTS="$2:$3:$1" "$faulty" $small -data text -steps 4 -run run
    holds out "stopped by SIG$1 after step $3"
    tail -n 1 run/log.jsonl | grep -q "\"step\":$3,\"reason\":\"SIG$1\""
    [[ $3 == 0 || -d run/checkpoints/step-0000000$3 ]]
    ends_with 0 "$program" -resume -run run
    is_same run
}
while_merging() { # SIGNAL
    ends_with "$(code_of "$1")" env FAULTS="merging:0:$1" "$faulty" $small -data text -steps 4 -run run
    holds err '^train_gpt: error: training the tokenizer: stopped after 0 of 3 merges by a signal$'
    [[ $(wc -l < err) == 1 && ! -e run ]]
    ends_with 0 "$program" $small -data text -steps 4 -run run
    is_same run
}
two_in_a_phase() { # SIGNAL PLACE STEP
    ends_with "$(code_of "$1")" env FAULTS="$2:$3:$1*2" "$faulty" $small -data text -steps 4 -run run
    # At once: the step is not finished, nothing is saved, no end is written.
    if grep -q '"type":"end"' run/log.jsonl; then return 1; fi
    [[ ! -d run/checkpoints/step-0000000$3 ]]
    ends_with 0 "$program" $small -data text -steps 4 -resume -run run
    is_same run
}
hang_up() { # PLACE STEP
    ends_with 0 env FAULTS="$1:$2:HUP" "$faulty" $small -data text -steps 4 -run run
    [[ ! -s err ]]
    is_same run
}
# What is done instead of training, with the model of `reference`.
instead() { # SIGNAL FAULT ARGUMENT...
    local signal=$1 fault=$2
    shift 2
    ends_with "$(code_of "$signal")" env FAULTS="$fault:$signal" "$faulty" "$@"
}
# A comparison's runs are processes of their own; a signal to the first one is handed on.
comparing() { # SIGNAL
    local process status=0
    "$program" $small -data text -steps 100000 -compare naive,flash -run run > out 2> err &
    process=$!
    for _ in $(seq 600); do
        grep -q -s '"step":2,' run/naive/log.jsonl && break
        sleep 0.05
    done
    kill -s "$1" $process
    wait $process || status=$?
    ((status == $(code_of "$1"))) || { echo "exit code $status: $(cat err)"; return 1; }
    tail -n 1 run/naive/log.jsonl | grep -q "\"reason\":\"SIG$1\""
    [[ -n $(ls run/naive/checkpoints) ]]
}
if [[ -x $faulty ]]; then
    for signal in INT TERM USR1; do
        run_test "SIG$signal while the tokenizer is trained" while_merging $signal
        run_test "SIG$signal in the rehearsal" in_a_phase $signal rehearsal 0
        run_test "SIG$signal in the first evaluation" in_a_phase $signal evaluation 0
        for step in 1 2 4; do run_test "SIG$signal in step $step" in_a_phase $signal step $step; done
        for place in evaluation sampling saving; do
            for step in 2 4; do run_test "SIG$signal in $place after step $step" in_a_phase $signal $place $step; done
        done
        for place in step evaluation sampling saving; do
            run_test "two SIG$signal in $place" two_in_a_phase $signal $place 2
        done
        run_test "SIG$signal in -generate" instead $signal sampling:0 -generate -load reference -device cpu
        run_test "SIG$signal in -evaluate" instead $signal evaluation:0 -evaluate -load reference -device cpu
        run_test "two SIG$signal in -generate" instead "$signal*2" sampling:0 -generate -load reference -device cpu
        run_test "SIG$signal in -compare" comparing $signal
    done
    for place in step evaluation sampling saving; do run_test "SIGHUP in $place" hang_up $place 2; done
else
    skip 'signals in a phase' "there is no $faulty (make test builds it on Linux)"
fi

# ---- nobody listens ----
reader_goes_away() {
    local status
    set +e
    "$program" $small -data text -steps 4 -run run 2> err | head -n 1 > out
    status=${PIPESTATUS[0]}
    set -e
    [[ $status == 0 && ! -s err ]] || { echo "exit code $status: $(cat err)"; return 1; }
    is_same run
}
# Closed from the start: what is printed must not get into a file that was opened in the stream's place.
streams_are_closed() { # REDIRECTION...
    local status=0 file
    eval '"$program" $small -data text -steps 4 -run run' "$*" || status=$?
    ((status == 0)) || { echo "exit code $status"; return 1; }
    is_same run
    # The files that are open all along.
    [[ $(cat run/lock) =~ ^[0-9]+$ ]] || { echo "the lock holds: $(head -n 3 run/lock)"; return 1; }
    if grep -v '^{"type":.*}$' run/log.jsonl; then return 1; fi
    for file in config.json tokenizer.json merges.txt; do cmp "reference/$last/$file" "run/$last/$file"; done
    diff <(sed '/"data"/d' reference/run.json) <(sed '/"data"/d' run/run.json)
}
stdout_is_closed_to_a_filter() {
    status=0
    "$program" -generate -load reference -sample-tokens 5 > /dev/full 2> err || status=$?
    ((status == 1)) && holds err 'error: cannot write to stdout'
    status=0
    "$program" -generate -load reference -sample-tokens 5 2> err >&- || status=$?
    ((status == 1)) && holds err 'error: cannot write to stdout'
    status=0
    "$program" -encode -tokenizer reference 2> err <&- || status=$?
    ((status == 1)) && holds err 'error: cannot read stdin'
}
# The terminal goes away under a run that is its session's leader: SIGHUP, and writing fails with EIO.
terminal_goes_away() {
    command -v python3 > /dev/null || { echo 'no python3'; exit 77; }
    python3 - "$program" $small -data text -steps 4 -run run << 'PYTHON'
import os, pty, sys
process, terminal = pty.fork()
if process == 0:
    os.execv(sys.argv[1], sys.argv[1:])
os.read(terminal, 1)
os.close(terminal)
status = os.waitpid(process, 0)[1]
print("status", status)
sys.exit(status != 0)
PYTHON
    is_same run
}
run_test 'the reader of stdout goes away' reader_goes_away
run_test 'stdout is closed' streams_are_closed '> /dev/null >&-'
run_test 'stderr is closed' streams_are_closed '> /dev/null 2>&-'
run_test 'stdin, stdout and stderr are closed' streams_are_closed '<&- >&- 2>&-'
if [[ -e /dev/full ]]; then
    run_test 'stdout is full' streams_are_closed '> /dev/full'
    run_test 'stdout of a filter is closed' stdout_is_closed_to_a_filter
fi
run_test 'the terminal goes away' terminal_goes_away
echo "signals: $passed passed, $failed failed, $skipped skipped"
[[ $failed == 0 ]]
