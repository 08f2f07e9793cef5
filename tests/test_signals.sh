#!/usr/bin/env bash
# test_signals.sh - one SIGINT, SIGTERM or SIGUSR1 ends a run within a step, saved, with exit code 130, 143 or 138,
# whatever the run is at: such a signal comes at each system call of a run from its text to its end, and in the
# middle of each phase that makes none. Two end it at once. What is left goes on, or starts again, to the same end.
# A closed terminal, pipe or standard stream ends nothing. Takes the program's path, beside which
# tests/crash_shim.so and tests/faulty_train_gpt were built; at last "signals: N passed, N failed, N skipped".
# SIGNALS_EVERY=n tries every n-th call only (1: all of them).
# shellcheck disable=SC2086 # lists of flags are words
set -u
# shellcheck source-path=SCRIPTDIR source=lib.sh
. "$(dirname "$0")/lib.sh"
start_tests signals "$@"
every=${SIGNALS_EVERY:-4}
fresh=(run world world.trace)

code_of() { case $1 in INT*) echo 130 ;; TERM*) echo 143 ;; *) echo 138 ;; esac; }
is_same() {
    same_state "$(step_of reference 4)" "$(step_of "$1" 4)" &&
        diff <(rows reference 'step|eval|sample') <(rows "$1" 'step|eval|sample')
}

mkdir text
for i in $(seq 20); do printf 'Anna had %d hats. Ben lost it\n' "$i" > "text/$i.txt"; done
# The steps are in no flag here: they come first or last.
small="-vocab 260 -device cpu -threads 1 -layers 1 -heads 2 -channels 16 -ctx 16 -batch 2 -dropout 0.1 -eval-every 2
    -eval-tokens 32 -sample-every 2 -samples 1 -sample-tokens 4 -checkpoint-every 2"
ends_with 0 "$program" $small -data text -steps 4 -run reference || { cat err; exit 1; }

# ---- at each system call ----
# The text lies in the folder that is watched, so that its reading is among the calls.
in_world() { # WORLD AT HOW
    watched "$@" "$program" $small -data "$tmp/$1/text" -steps 4 -run "$tmp/$1/run"
}
signal_at() { # WORLD CALL SIGNAL
    local status=0
    rm -rf "$1" "$1.trace"
    mkdir "$1" && cp -r text "$1/" || return
    in_world "$1" "$2" "$3" > "$1.out" 2> "$1.err" || status=$?
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
    # Stopped before there was a run: then it begins, and says so.
    if grep -v '^train_gpt: note: there is no run in ' "$1.err"; then return 1; fi
    is_same "$1/run"
}
each_call() {
    local calls worker n signals=(INT TERM USR1)
    mkdir world
    cp -r text world
    ends_with 0 in_world world 0 INT
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
    mkdir world && cp -r text world/ && { in_world world 0 INT > out 2> err || status=$?; }
fi
if [[ ! -e $shim ]]; then
    skip 'a signal at each call' "there is no $shim (make test builds it on Linux)"
elif ((status == 77)); then
    skip 'a signal at each call' 'this system has no seccomp filters'
else
    run_as 'a signal at each call' each_call
    passed=$((passed + $(cat each_call.[01] | wc -l)))
fi
two_at_a_call() { # SIGNAL WORDS-OF-CALL
    local n
    mkdir world
    cp -r text world
    in_world world 0 INT > out 2> err
    n=$(sed -n "s,^\([0-9]*\) $2.*,\1,p" world.trace | head -n 1)
    rm -r world
    mkdir world
    cp -r text world
    ends_with "$(code_of "$1")" in_world world "$n" "$1*2"
    [[ ! -e world/run/log.jsonl ]] || ! grep -q '"type":"end"' world/run/log.jsonl # nothing more was done
    ends_with 0 "$program" $small -data "$tmp/world/text" -steps 4 -run world/run -resume
    is_same world/run
}
if [[ -e $shim ]] && ((status != 77)); then
    run_as 'two signals while reading' two_at_a_call INT "read .*/text/7.txt"
    run_as 'two signals while writing tokens' two_at_a_call TERM "write .*/heldout-00000"
    run_as 'two signals while saving' two_at_a_call USR1 "write .*/optimizer.safetensors"
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
# One signal that comes to a process and again to its group is one: the run saves.
stopped_by_group() { # SIGNAL
    local process status=0
    "$program" $small -data text -steps 100000000 -checkpoint-every 0 -eval-every 0 -sample-every 0 -run run > out 2> err &
    process=$!
    until_step run 2
    kill -s "$1" $process $process 2> /dev/null || true # it may have saved and ended before the second
    wait $process || status=$?
    ((status == $(code_of "$1"))) || say_and_fail "exit code $status: $(cat err)"
    holds out "stopped by SIG$1 after step .*, which is saved"
    [[ -n $(newest run) ]]
}
for signal in INT TERM USR1; do run_as "SIG$signal twice in a moment" stopped_by_group $signal; done
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
    "$program" $small -data text -steps 100000 -compare naive,flash -run run > out 2> err &
    local process=$!
    until_step run/naive 2
    stops "$1" $process "$(code_of "$1")"
    tail -n 1 run/naive/log.jsonl | grep -q "\"reason\":\"SIG$1\""
    [[ -n $(newest run/naive) ]]
}
if [[ -x $faulty ]]; then
    for signal in INT TERM USR1; do
        run_as "SIG$signal while the tokenizer is trained" while_merging $signal
        run_as "SIG$signal in the rehearsal" in_a_phase $signal rehearsal 0
        run_as "SIG$signal in the first evaluation" in_a_phase $signal evaluation 0
        for step in 1 2 4; do run_as "SIG$signal in step $step" in_a_phase $signal step $step; done
        for place in evaluation sampling saving; do
            for step in 2 4; do run_as "SIG$signal in $place after step $step" in_a_phase $signal $place $step; done
        done
        for place in step evaluation sampling saving; do
            run_as "two SIG$signal in $place" two_in_a_phase $signal $place 2
        done
        run_as "SIG$signal in -generate" instead $signal sampling:0 -generate -load reference -device cpu
        run_as "SIG$signal in -evaluate" instead $signal evaluation:0 -evaluate -load reference -device cpu
        run_as "two SIG$signal in -generate" instead "$signal*2" sampling:0 -generate -load reference -device cpu
        run_as "SIG$signal in -compare" comparing $signal
    done
    for place in step evaluation sampling saving; do run_as "SIGHUP in $place" hang_up $place 2; done
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
    for file in config.json tokenizer.json merges.txt; do cmp "$(step_of reference 4)/$file" "$(step_of run 4)/$file"; done
    diff <(sed '/"data"/d' reference/run.json) <(sed '/"data"/d' run/run.json)
}
full_stdout() { "$@" > /dev/full; }
closed_stdout() { "$@" >&-; }
closed_stdin() { "$@" <&-; }
streams_of_a_filter() {
    ends_with 1 full_stdout "$program" -generate -load reference -sample-tokens 5
    holds err 'error: cannot write to stdout'
    ends_with 1 closed_stdout "$program" -generate -load reference -sample-tokens 5
    holds err 'error: cannot write to stdout'
    ends_with 1 closed_stdin "$program" -encode -tokenizer reference
    holds err 'error: cannot read stdin'
}
# The terminal goes away under a run that is its session's leader: SIGHUP, and writing fails with EIO.
terminal_goes_away() {
    needs_python
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
run_as 'the reader of stdout goes away' reader_goes_away
run_as 'stdout is closed' streams_are_closed '> /dev/null >&-'
run_as 'stderr is closed' streams_are_closed '> /dev/null 2>&-'
run_as 'stdin, stdout and stderr are closed' streams_are_closed '<&- >&- 2>&-'
if [[ -e /dev/full ]]; then
    run_as 'stdout is full' streams_are_closed '> /dev/full'
    run_as 'a standard stream of a filter is closed' streams_of_a_filter
fi
run_as 'the terminal goes away' terminal_goes_away
finish
