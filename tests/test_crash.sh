#!/usr/bin/env bash
# test_crash.sh - nothing is lost: a run is killed at each system call that changes its folder, each of them
# fails once with ENOSPC and once with EIO, each that reads it once with EIO, and the disk is full for real. Takes
# the program's path, beside which tests/crash_shim.so was built; prints what failed, and at last "crash: N passed,
# N failed, N skipped".
#
# The run goes on from its checkpoint after step 1 to step 3, so that the calls are those of a start, of a
# save between steps with the removal of an older checkpoint, and of the last save. CRASH_EVERY=n tries every
# n-th call only, for builds that are slow.
set -u
# shellcheck source-path=SCRIPTDIR source=lib.sh
. "$(dirname "$0")/lib.sh"
start_tests crash "$@"
every=${CRASH_EVERY:-1}

go_on() { "$program" -resume -run "$tmp/$1" -keep 1; }

# The run is where it would be without any trouble: model, optimizer, each step once in the log (unless rows
# could not be written), nothing left of a file that was begun.
is_right() { # RUN [no-log]
    same_state "$(step_of reference 3)" "$(step_of "$1" 3)" || return
    [[ ${2-} == no-log ]] || steps_of "$1" | cmp - reference.steps || return
    [[ -z $(find "$1" -name '*.tmp*') ]] || say_and_fail "left over: $(find "$1" -name '*.tmp*')"
}

# ---- the runs that all begin with ----
for i in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20; do
    printf 'Anna had %d hats. Ben found one of them, and they were glad.\n<|endoftext|>\n' $i
done > stories.txt
ends_with 0 "$program" -data stories.txt -vocab 257 -threads 1 -layers 1 -heads 1 -channels 16 -ctx 16 -batch 2 \
    -dropout 0.1 -steps 3 -samples 0 -eval-every 0 -eval-tokens 16 -checkpoint-every 1 -keep 9 -run reference ||
    { cat err; exit 1; }
steps_of reference > reference.steps
cp -r reference base
rm -r base/checkpoints/step-0000000[23]

# ---- full for real: in a file system of 1 MiB, with more and more pages left ----
full_disk() {
    local pages status
    mkdir full
    mount -t tmpfs -o size=1m tmpfs full
    for pages in 0 1 2 3 4 5 6 8 10 12 16 20 24 28 32 40 60 100; do
        cp -r base full/run
        dd if=/dev/zero of=full/filler bs=4096 2> dd.output || true
        truncate -s -$((4096 * pages)) full/filler
        status=0
        go_on full/run > output 2> errors || status=$?
        # Whatever happens is said, and where a save failed, the one before is there.
        if [[ $status == 1 ]]; then
            tail -n 1 errors | grep -q '^train_gpt: error: ' ||
                { echo "$pages pages: $(cat errors)"; return 1; }
            echo refused >> outcomes
        elif [[ $status != 0 ]]; then
            echo "$pages pages: exit code $status: $(cat errors)"
            return 1
        fi
        if grep -q 'the training goes on' errors; then echo went-on >> outcomes; fi
        rm full/filler
        go_on full/run > output 2> errors || { echo "$pages pages, then room: $(cat errors)"; return 1; }
        is_right full/run no-log || { echo "$pages pages"; return 1; }
        rm -r full/run
    done
    # Too few pages for the start, too few for a save, and enough: each was among them.
    if ! grep -q went-on outcomes || (($(grep -c refused outcomes) == 18)); then
        sort outcomes | uniq -c
        return 1
    fi
}
run_as 'a disk that is full' in_own_mounts full_disk

# ---- the order of calls ----
if [[ ! -e $shim ]]; then
    skip 'crashes' "there is no $shim (make test builds it on Linux)"
    finish
    exit
fi
cp -r base run
status=0
watched run 0 kill go_on run > watched.output 2>&1 || status=$?
if ((status == 77)); then
    skip 'crashes' 'this system has no seccomp filters'
    finish
    exit
fi
calls=$(wc -l < run.trace)
run_is_watched() {
    cat watched.output
    ((status == 0))
    echo "$calls calls"
    ((calls >= 100))
    is_right run
}
run_as 'the run that is watched' run_is_watched
if ((status != 0 || calls < 100)); then
    finish
    exit
fi

# What gets its name by a rename was written as NAME.tmp...: all of it is on the disk before, files first,
# then the folder; the name itself is brought to the disk before anything else happens. MANIFEST comes last.
order_of_calls() {
    awk '
        function wrong(what) { print "call " $1 ": " $2 " " $3 ": " what; bad = 1 }
        function folder(path) { sub("/[^/]*$", "", path); return path }
        next_fsync != "" && ($2 != "fsync" || $3 != next_fsync) { wrong("expected fsync " next_fsync) }
        { next_fsync = "" }
        $2 == "open" || $2 == "write" { unsynced[$3] = 1 }
        $2 == "open" { unsynced[folder($3)] = 1; if (folder($3) in manifest) wrong("a file after MANIFEST") }
        $2 == "open" && $3 ~ "/MANIFEST$" {
            manifest[folder($3)] = 1
            for (path in unsynced)
                if (index(path, folder($3) "/") == 1 && path != $3) wrong(path " is not on the disk")
        }
        $2 == "fsync" {
            for (path in unsynced)
                if (index(path, $3 "/") == 1 && $3 ~ "/step-[0-9]*[.]tmp") wrong("before " path)
            delete unsynced[$3]
        }
        $2 == "rename" {
            for (path in unsynced) if (index(path, $3 ".tmp") == 1) wrong(path " is not on the disk")
            next_fsync = folder($3)
            if ($3 ~ "/checkpoints/step-[0-9]*$") saves++
            renames++
        }
        END {
            if (saves != 2 || renames < 6) { print saves + 0 " saves and " renames + 0 " renames"; bad = 1 }
            exit bad
        }' run.trace
}
run_as 'the order of calls' order_of_calls

# ---- killed at call N ----
killed_at() {
    local name=kill-$1 status=0 saved
    cp -r base "$name"
    watched "$name" "$1" kill go_on "$name" > "$name.out" 2> "$name.err" || status=$?
    [[ $status == 137 ]] || { echo "exit code $status: $(cat "$name.err")"; return 1; }
    # The newest checkpoint that had got its name before the last call, which was not made.
    saved=$(sed '$d' "$name.trace" | sed -n 's/.* rename .*\/step-0*\([0-9]*\)$/\1/p' | tail -n 1)
    go_on "$name" > "$name.out" 2> "$name.err" || { echo "going on: $(cat "$name.err")"; return 1; }
    [[ ! -s $name.err ]] || { echo "going on, it said: $(cat "$name.err")"; return 1; }
    grep -q "going on after step ${saved:-1} of" "$name.out" ||
        { echo "step ${saved:-1} was saved, but: $(grep 'going on' "$name.out")"; return 1; }
    is_right "$name"
}

# ---- call N fails ----

# The old checkpoint is not touched before a new one has its name on the disk.
old_one_stays() { # N TRACE
    awk -v n="$1" '
        $2 == "rename" && $3 ~ "/checkpoints/step-" { renamed = $1 != n; next }
        renamed { safe = safe || $1 != n; renamed = 0 }
        ($2 == "unlink" || $2 == "rmdir") && $3 ~ "/step-00000001(/|$)" && !safe {
            print "too early: " $0
            exit 1
        }
    ' "$2"
}
failing_at() { # N ERROR WORDS
    local name=fail-$2-$1 status=0 call path log=''
    cp -r base "$name"
    watched "$name" "$1" "$2" go_on "$name" > "$name.out" 2> "$name.err" || status=$?
    old_one_stays "$1" "$name.trace" || return
    read -r _ call path < <(sed -n "$1p" "$name.trace")
    [[ $path == "$tmp/$name/log.jsonl" ]] && log=no-log
    case "$call $path" in
    'close '*/lock | 'close '*/log.jsonl) ;; # at the very end; what they hold was written before
    'ftruncate '*/lock | 'pwrite '*/lock) ;; # a number for a message
    *) grep -q "$3" "$name.err" || { echo "not said: $(cat "$name.err")"; return 1; } ;;
    esac
    if [[ $status == 1 ]]; then
        # Only at the start, or where the last save failed: of a run that goes on nothing else may end it.
        tail -n 1 "$name.err" | grep -q '^train_gpt: error: ' ||
            { echo "no error: $(cat "$name.err")"; return 1; }
        case "$call $path" in
        *' '*/step-00000003* | *' '*/lock | *' '*/run.json* | *' '*/log.jsonl.tmp) ;;
        'rename '*/log.jsonl | "fsync $tmp/$name") ;; # the run folder: after the rename of one of these
        *) [[ $call == fsync && $(sed -n "$(($1 - 1))p" "$name.trace") == *' rename '*/step-00000003 ]] ||
            { echo "ended the run: $(cat "$name.err")"; return 1; } ;;
        esac
        go_on "$name" > "$name.out" 2> "$name.err" || { echo "going on: $(cat "$name.err")"; return 1; }
        [[ ! -s $name.err ]] || { echo "going on, it said: $(cat "$name.err")"; return 1; }
    elif [[ $status != 0 ]]; then
        echo "exit code $status: $(cat "$name.err")"
        return 1
    fi
    is_right "$name" "$log"
}

# Two at a time; each test is one line in the file that collects them: passed, or what went wrong.
try_all() { # NAME FUNCTION ARGUMENT...
    local name=$1 function=$2 worker
    shift 2
    for worker in 0 1; do
        for ((n = 1 + worker * every; n <= calls; n += 2 * every)); do
            if "$function" $n "$@" > "tried.$worker" 2>&1; then
                echo passed
            else
                call=$(sed -n "s,^$n \\(.*\\)$tmp/,\\1,p" run.trace)
                echo "call $n, $call: $(head -n 3 "tried.$worker")"
            fi
            rm -rf ./*-"$n" ./*-"$n".*
        done > "results.$worker" &
    done
    wait
    cat results.0 results.1 > results
    passed=$((passed + $(grep -c '^passed$' results)))
    if grep -v '^passed$' results > output; then
        failed=$((failed + $(grep -c '^call ' output)))
        echo "  FAILED $name"
        head -n 30 output | sed 's/^/    /'
    fi
}
try_all 'killed' killed_at
try_all 'no space left' failing_at ENOSPC 'No space left on device'
try_all 'input/output error' failing_at EIO 'Input/output error'

# ---- call N that reads fails ----
# What cannot be read is neither damaged nor gone: no step is taken again, from an older checkpoint or from none, and
# the newest checkpoint stays. The run refuses, or ends right.
cp -r reference newest
rm -r newest/checkpoints/step-00000003
unread_at() { # N
    local name=unread-$1 status=0
    cp -r newest "$name"
    CRASH_READS=1 watched "$name" "$1" EIO go_on "$name" > "$name.out" 2> "$name.err" || status=$?
    [[ $status == [01] ]] || { echo "exit code $status: $(cat "$name.err")"; return 1; }
    if grep 'going on after step' "$name.out" | grep -v 'after step 2 of'; then return 1; fi
    if ((status == 0)); then
        grep -q 'going on after step 2 of' "$name.out" || { echo 'it began anew'; return 1; }
        same_state "$(step_of reference 3)" "$(step_of "$name" 3)" || return
    else
        tail -n 1 "$name.err" | grep -q '^train_gpt: error: .' || { echo "no error: $(cat "$name.err")"; return 1; }
        [[ -d $(step_of "$name" 3) ]] || same_state "$(step_of reference 2)" "$(step_of "$name" 2)" || return
    fi
    go_on "$name" > "$name.out" 2> "$name.err" || { echo "going on: $(cat "$name.err")"; return 1; }
    [[ ! -s $name.err ]] || { echo "going on, it said: $(cat "$name.err")"; return 1; }
    grep -q 'going on after step [23] of' "$name.out" || { echo 'then it began anew'; return 1; }
    is_right "$name"
}
rm -r run run.trace
cp -r newest run
CRASH_READS=1 watched run 0 EIO go_on run > watched.output 2>&1
calls=$(wc -l < run.trace)
enough_reads() { ((calls >= 100)) || say_and_fail "$calls calls: $(cat watched.output)"; }
run_as 'the run whose reading is watched' enough_reads
try_all 'unreadable' unread_at
finish
