# shellcheck shell=bash
# lib.sh - what the test scripts share: where they work, how a test is run and counted, what is asked of the
# program and of the runs that it leaves. A script sources it and begins with `start_tests`; a test is a function
# that `run_test` or `run_as` runs; `finish` is the last command.
#
# A test runs in a shell of its own with `set -e`, so that the first command that fails ends it; one that exits with
# 77 is skipped, for the reason that it printed last. What set -e does not see: all but the last of `a && b`, `! a`
# (so each check is a command of its own; lacks, differs), and whatever a function does that is called in a condition
# (so a helper says by its status how it went).

# start_tests NAME PROGRAM: sets program, its neighbours built for tests (shim, faulty), and tmp, an empty folder that
# goes with the script and that it now stands in. NAME is for the closing line.
start_tests() {
    suite=$1
    program=$(realpath "${2:?usage: $0 PROGRAM}") || exit 1
    shim=$(dirname "$program")/tests/crash_shim.so
    # shellcheck disable=SC2034 # for the scripts
    faulty=$(dirname "$program")/tests/faulty_train_gpt
    passed=0 failed=0 skipped=0
    unset OMP_NUM_THREADS
    export OMP_WAIT_POLICY=passive # threads that wait do not spin, on a machine that is busy with other tests
    # In memory where there is such a folder: some tests would wait for the disk thousands of times.
    [[ -w /dev/shm ]] && export TMPDIR=/dev/shm
    tmp=$(mktemp -d) || exit 1
    trap 'rm -rf "$tmp"' EXIT
    cd "$tmp" || exit 1
    limit=() # a minute for a command, where the system has `timeout`
    command -v timeout > /dev/null && limit=(timeout --kill-after=5 60)
    fresh=()
}

# ---- running and counting tests ----

# run_test FUNCTION ARGUMENT...: a test that is told by these words.
run_test() { run_as "$*" "$@"; }
# run_as NAME FUNCTION ARGUMENT...: a test under a name of its own. What `fresh` lists is removed before each.
run_as() {
    local name=$1
    shift
    rm -rf ${fresh[@]+"${fresh[@]}"}
    (set -e; "$@") > "$tmp/output" 2>&1
    count_result "$name" $? "$tmp/output" # no condition: that would switch -e off
}
# count_result NAME STATUS FILE: of a test that has ended with that status and printed that.
count_result() {
    case $2 in
    0) passed=$((passed + 1)) ;;
    77) skip "$1" "$(tail -n 1 "$3")" ;;
    *)
        failed=$((failed + 1))
        echo "  FAILED $1"
        tail -n 25 "$3" | cut -c 1-300 | sed 's/^/    /'
        ;;
    esac
}
# skip NAME REASON [N]: a test, or N of them, that cannot be tried here.
skip() {
    skipped=$((skipped + ${3:-1}))
    echo "  skipped $1: $2"
}
# skip_all REASON: the whole script; it ends.
skip_all() {
    skip "$suite" "$1"
    finish
    exit
}
# Prints the closing line; its status is the script's: 0 if nothing failed.
finish() {
    echo "$suite: $passed passed, $failed failed, $skipped skipped"
    [[ $failed == 0 ]]
}
# say_and_fail WORD...: why a test fails.
say_and_fail() {
    echo "$*"
    return 1
}
# A test that needs python3 is skipped without it.
needs_python() { command -v python3 > /dev/null || { echo 'no python3'; exit 77; }; }

# ---- what the program answers ----

# ends_with CODE COMMAND...: it does, its output in `out` and `err`.
ends_with() {
    local expected=$1 status=0
    shift
    "$@" > out 2> err || status=$?
    ((status == expected)) || say_and_fail "exit code $status, expected $expected: $(tail -n 1 err)"
}
# refused CODE WORDS ARGUMENT...: the program ends with that code within a minute, prints nothing on stdout and one
# line on stderr, which is short, has no control characters, and holds the words (a grep pattern).
refused() {
    local code=$1 words=$2 status=0
    shift 2
    ${limit[@]+"${limit[@]}"} "$program" "$@" < /dev/null > out 2> err || status=$?
    ((status == code)) || { echo "$*: exit code $status, expected $code: $(cat err)"; return 1; }
    [[ ! -s out ]] || { echo "$*: on stdout: $(cat out)"; return 1; }
    [[ $(wc -l < err) == 1 && $(wc -c < err) -lt 1100 ]] || { echo "$*: not one line: $(cat err)"; return 1; }
    if tr -d '\n' < err | LC_ALL=C grep -q -a '[[:cntrl:]]'; then
        echo "$*: control characters: $(cat -v err)"
        return 1
    fi
    grep -q -a '^train_gpt: error: ' err || { echo "$*: $(cat err)"; return 1; }
    LC_ALL=C grep -q -a -e "$words" err || say_and_fail "$*: no '$words' in: $(cat err)"
}
# holds FILE PATTERN: one line of the file has it.
holds() { grep -q -e "$2" "$1" || say_and_fail "no '$2' in: $(cat "$1")"; }

# lacks FILE PATTERN: no line has it.
lacks() { if grep -e "$2" "$1"; then return 1; fi; }
differs() { if cmp -s "$1" "$2"; then say_and_fail "$1 and $2 are the same"; fi; }

# until_holds FILE PATTERN: waits for a line that has it, half a minute at most.
until_holds() {
    for _ in $(seq 600); do
        grep -q -s -e "$2" "$1" && return
        sleep 0.05
    done
    say_and_fail "$1 never had '$2'"
}
# until_step RUN N: waits for the log to have that step; where it never has, what follows sees that.
until_step() { until_holds "$1/log.jsonl" "\"step\":$2," || true; }
# stops SIGNAL PROCESS CODE: a process of this shell, its stderr in `err`, ends with that code after the signal.
stops() {
    local status=0
    kill -s "$1" "$2"
    wait "$2" || status=$?
    ((status == $3)) || say_and_fail "exit code $status after SIG$1, expected $3: $(cat err)"
}

# ---- what a run leaves ----

step_of() { printf '%s/checkpoints/step-%08d' "$1" "$2"; } # RUN N: the folder of that checkpoint
# newest RUN: the step of its newest checkpoint.
newest() { find "$1/checkpoints" -name 'step-*' | sort | sed -n '$s/.*step-0*//p'; }
# rows RUN TYPE: the rows of its log of that type (or 'a|b'), without what time has to do with.
rows() { grep -E "\"type\":\"($2)\"" "$1/log.jsonl" | sed 's/,"ms".*"tokens"/,"tokens"/'; }
steps_of() { rows "$1" step; } # RUN
# same_state CHECKPOINT CHECKPOINT: weights, and AdamW's m and v, are the same bits.
same_state() {
    cmp "$1/model.safetensors" "$2/model.safetensors" && cmp "$1/optimizer.safetensors" "$2/optimizer.safetensors"
}

# ---- surroundings ----

# stories N: a text of N small ones, on stdout.
stories() {
    local i
    for i in $(seq "$1"); do printf 'Anna had %d hats. Ben lost it\n<|endoftext|>\n' "$i"; done
}
# watched NAME AT HOW COMMAND...: with the shim (tests/crash_shim.c), which writes down the calls that change the folder
# $tmp/NAME, in $tmp/NAME.trace, and does to number AT what HOW says. The leak checker makes calls where none can be
# trapped, and the address sanitizer wants to be the first library, which a preloaded one is.
watched() {
    local name=$1 at=$2 how=$3
    shift 3
    CRASH_FOLDER=$tmp/$name CRASH_TRACE=$tmp/$name.trace CRASH_AT=$at CRASH_HOW=$how LD_PRELOAD=$shim \
        ASAN_OPTIONS=verify_asan_link_order=0:${ASAN_OPTIONS:+$ASAN_OPTIONS:}detect_leaks=0 "$@"
}
# in_own_mounts FUNCTION: in a shell that may mount file systems of its own, with all functions of this one and $program,
# $tmp, $text, $small. Skips the test where that is not allowed.
in_own_mounts() {
    unshare --user --map-root-user --mount mount -t tmpfs tmpfs "$tmp" 2> /dev/null ||
        { echo 'this user may not mount a file system of its own'; exit 77; }
    program=$program tmp=$tmp text=${text-} small=${small-} unshare --user --map-root-user --mount \
        bash -e -c "$(declare -f); limit=(); $1"
}
