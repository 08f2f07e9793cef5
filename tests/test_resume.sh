#!/usr/bin/env bash
# test_resume.sh - resuming changes nothing: a run that was stopped after k steps and gone on with ends with the
# bits of one that was not: weights, optimizer, state, every row of the log (but for times), at 20 places of a run
# of several epochs with dropout, evaluations and stories between, stopped by a signal, by -steps, by SIGKILL,
# again and again, and moved meanwhile. And no flag changes what belongs to the run. Takes the program's path,
# beside which tests/faulty_train_gpt was built; at last "resume: N passed, N failed, N skipped".
# shellcheck disable=SC2086 # lists of flags are words
set -u
program=$(realpath "${1:?usage: test_resume.sh PROGRAM}")
faulty=$(dirname "$program")/tests/faulty_train_gpt
unset OMP_NUM_THREADS
[[ -w /dev/shm ]] && export TMPDIR=/dev/shm
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
cd "$tmp" || exit 1
passed=0 failed=0 skipped=0

count() { # NAME STATUS: of what printed into the file `output`
    if (($2 == 0)); then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
        echo "  FAILED $1"
        tail -n 12 output | sed 's/^/    /'
    fi
}
skip() { skipped=$((skipped + 1)); echo "  skipped $1: $2"; }
finish() {
    echo "resume: $passed passed, $failed failed, $skipped skipped"
    [[ $failed == 0 ]]
    exit
}

# 35 windows of 16 tokens, 2 a step: an epoch ends within step 18 and with step 35. The held-out story, the last,
# is another kind of story, so that its loss rises again.
for i in $(seq 19); do
    printf 'Anna had %d hats. Ben lost it\n<|endoftext|>\n' "$i"
done > stories.txt
echo 'Tom saw two cats; Lily ran to the pond' >> stories.txt
steps=50
small="-data stories.txt -vocab 257 -device cpu -threads 1 -layers 2 -heads 2 -channels 16 -ctx 16 -batch 2 -dropout 0.1
    -lr 4e-2 -warmup 5 -eval-every 3 -eval-tokens 32 -sample-every 7 -samples 9 -sample-tokens 4
    -checkpoint-every 4"

rows() { grep "\"type\":\"$2\"" "$1/log.jsonl" | sed 's/,"ms".*"tokens"/,"tokens"/'; }
state() { sed '/"seconds"/d' "$1/state.json"; }
last() { printf '%s/checkpoints/step-%08d' "$1" $steps; }
best() { sed -n 's/.*"best_step": \([0-9]*\).*/\1/p' "$(last "$1")/state.json"; }

same_model() { cmp "$(last reference)/$2.safetensors" "$(last "$1")/$2.safetensors"; }
# Everything that a run leaves: model, optimizer, where it stands, its best, its log.
is_same() {
    local type step
    same_model "$1" model && same_model "$1" optimizer || return
    diff <(state "$(last reference)") <(state "$(last "$1")") || return
    step=$(printf 'checkpoints/step-%08d' "$(best reference)")
    cmp "reference/$step/model.safetensors" "$1/$step/model.safetensors" || return
    for type in step eval sample; do
        diff <(rows reference $type) <(rows "$1" $type) || { echo "rows of type $type"; return 1; }
    done
    [[ $(grep -c '"type":"end"' "$1/log.jsonl") == 1 ]]
}
ends_with() { # CODE COMMAND...
    local expected=$1 status=0
    shift
    "$@" > out 2> err || status=$?
    ((status == expected)) || { echo "exit code $status, expected $expected: $(tail -n 1 err)"; return 1; }
}

ends_with 0 "$program" $small -steps $steps -run reference > output 2>&1
count 'the run without a stop' $?
((failed == 0)) || finish
# The best is that of all evaluations after a step, and for what follows neither the first nor the last.
lowest() { rows "$1" eval | awk -F'[:,]' '$4 > 0 { print $6, $4 }' | sort -g | sed -n '1s/.* //p'; }
{
    [[ $(best reference) == "$(lowest reference)" ]] || echo "the best is $(best reference), not $(lowest reference)"
    [[ $(best reference) -gt 3 && $(best reference) -lt $steps ]] || echo "the best is $(best reference)"
    sed -n 's/^  an epoch *//p' out | grep -v '^35 windows'
} > output
count 'the run has a best in its middle, and epochs of 35 windows' $(($(wc -l < output) > 0))

# ---- a signal, SIGKILL ----
stopped_at() { # CODE FAULTS STEPS-THAT-ARE-SAVED
    rm -rf stopped moved
    ends_with "$1" env FAULTS="$2" "$faulty" $small -steps $steps -run stopped || return
    [[ -z $3 || -d $(printf 'stopped/checkpoints/step-%08d' "$3") ]] || { ls stopped/checkpoints; return 1; }
    mv stopped moved || return
    ends_with 0 "$program" -resume -run moved || return
    [[ ! -s err ]] || { cat err; return 1; }
    is_same moved
}
if [[ -x $faulty ]]; then
    signals=(INT TERM USR1) codes=(130 143 138)
    for k in 1 2 3 6 7 8 12 14 17 18 19 21 24 28 34 35 36 42 48 49; do
        i=$((k % 3))
        stopped_at ${codes[i]} step:$k:${signals[i]} $k > output 2>&1
        count "stopped by SIG${signals[i]} in step $k" $?
        stopped_at 137 step:$k:KILL '' > output 2>&1
        count "killed in step $k" $?
    done
    for k in 3 21 42 $steps; do
        stopped_at 130 evaluation:$k:INT $k > output 2>&1
        count "stopped in the evaluation after step $k" $?
    done
    for k in 7 14 21 42 $steps; do
        stopped_at 143 sampling:$k:TERM $k > output 2>&1
        count "stopped in the stories after step $k" $?
    done
    for k in 4 12 28 $steps; do
        stopped_at 138 saving:$k:USR1 $k > output 2>&1
        count "stopped while step $k is saved" $?
        stopped_at 137 saving:$k:KILL '' > output 2>&1
        count "killed while step $k is saved" $?
    done
    stopped_at 130 evaluation:0:INT '' > output 2>&1
    count 'stopped in the evaluation before the first step' $?

    many_times() {
        rm -rf stopped
        ends_with 130 env FAULTS=step:2:INT "$faulty" $small -steps $steps -run stopped || return
        for fault in step:3:INT step:9:INT sampling:14:INT step:21:INT evaluation:24:INT step:30:INT step:42:INT \
            step:43:INT rehearsal:0:INT evaluation:48:INT saving:$steps:INT; do
            ends_with 130 env FAULTS=$fault "$faulty" -resume -run stopped || return
        done
        ends_with 0 "$program" -resume -run stopped && is_same stopped
    }
    many_times > output 2>&1
    count 'stopped twelve times' $?
    # Killed while that is made up for which a stop had left: after the evaluation, in the saving, after it.
    killed_in_the_rest() {
        rm -rf stopped
        ends_with 130 env FAULTS=step:21:INT "$faulty" $small -steps $steps -run stopped || return
        ends_with 137 env FAULTS=sampling:0:KILL "$faulty" -resume -run stopped || return
        [[ $(grep -c '"type":"eval","step":21,' stopped/log.jsonl) == 1 ]] || return
        ends_with 137 env FAULTS=saving:0:KILL "$faulty" -resume -run stopped || return
        [[ $(grep -c '"type":"sample","step":21,' stopped/log.jsonl) == 9 ]] || return
        ends_with 143 env FAULTS=sampling:0:TERM "$faulty" -resume -run stopped || return
        ends_with 137 env FAULTS=step:22:KILL "$faulty" -resume -run stopped || return
        ends_with 0 "$program" -resume -run stopped && is_same stopped
    }
    killed_in_the_rest > output 2>&1
    count 'killed while the rest of a step is done' $?
else
    skip 'signals' "there is no $faulty (make test builds it on Linux)"
fi

# ---- -steps, raised ----
# The learning rate depends on -steps unless it is constant. Stops add evaluations and stories of their own.
reference_rows() { rows "$1" eval | awk -F'[:,]' '$4 % 3 == 0 || $4 == '$steps; }
raised_from() { # K
    rm -rf raised
    ends_with 0 "$program" $small -min-lr 4e-2 -steps "$1" -run raised || return
    ends_with 0 "$program" -resume -run raised -steps $steps || return
    same_model raised model && same_model raised optimizer &&
        diff <(rows reference step) <(rows raised step) && diff <(reference_rows reference) <(reference_rows raised)
}
mv reference cosine
ends_with 0 "$program" $small -min-lr 4e-2 -steps $steps -run reference > output 2>&1
count 'the run with a constant learning rate' $?
for k in 1 2 3 4 5 7 9 12 14 17 18 19 21 25 29 34 35 42 45 49; do
    raised_from $k > output 2>&1
    count "-steps $k, then -steps $steps" $?
done
rm -r reference

# ---- -minutes ----
# The number of steps is fixed once; then each place of the run that was not stopped is gone on from.
minutes_are_fixed_once() {
    ends_with 0 "$program" $small -minutes 0.01 -keep 1000000 -checkpoint-every 1 -run reference || return
    steps=$(sed -n 's/.*"steps": \([0-9]*\),.*/\1/p' reference/run.json)
    ((steps > 25)) || { echo "$steps steps are too few"; return 1; }
    local k at
    for at in 2 3 5 7 9; do
        k=$((24 + (steps - 25) * at / 10))
        rm -rf again
        cp -r reference again
        find again/checkpoints -name 'step-*' | sort | tail -n +$((k + 1)) | xargs rm -r
        if ((at % 2)); then ends_with 0 "$program" -resume -run again || return
        else ends_with 0 "$program" -resume -run again -minutes 0.01 || return
        fi
        if ! { grep -q "\"steps\": $steps," again/run.json && is_same again; }; then
            echo "from step $k of $steps"
            return 1
        fi
    done
    # The number given outright is no change either; the schedule of -minutes stays.
    find again/checkpoints -name 'step-*' | sort | tail -n +25 | xargs rm -r
    ends_with 0 "$program" -resume -run again -steps $steps && is_same again
}
minutes_are_fixed_once > output 2>&1
count '-minutes' $?
rm -rf reference again
mv cosine reference
steps=50

# ---- flags ----
# A value that differs from the run's, for every flag of the table that is a setting; those that may change are
# taken, all others refused with both values.
changeable='-attention -deterministic -micro -steps -eval-every -sample-every -samples -prompt -sample-tokens
    -temperature -top-k -top-p -checkpoint-every -keep -device -precision -threads'
help_lists_them() {
    diff <(printf '%s\n' $changeable) <("$program" -help | sed -n '/^when a run goes on/,/^$/p' | grep -o -e '-[a-z][a-z-]*')
}
help_lists_them > output 2>&1
count '-help lists what may change' $?
"$program" -print-config -resume -run reference > settings
other_value() { # KEY VALUE
    case $1 in
    data | heldout | tokenizer | load) echo elsewhere ;;
    prompt) echo Anna ;;
    position) echo learned ;;
    attention) echo naive ;;
    deterministic) echo true ;;
    device) echo auto ;;
    precision) echo auto ;;
    micro) echo 1 ;;
    steps) echo $((steps + 1)) ;;
    minutes) echo 7 ;;
    vocab) echo 300 ;;
    top_p) echo 0.5 ;;
    beta1 | beta2) echo 0.5 ;;
    min_lr) echo 1e-5 ;;
    dropout | lr | weight_decay | clip | temperature) echo 0.25 ;;
    *) echo $(($2 + 1)) ;;
    esac
}
each_flag() {
    local key value flag other status bad=0 taken=0 refused=0
    while read -r key value; do
        flag=-${key//_/-}
        other=$(other_value "$key" "$value")
        status=0
        # Nothing is trained: -dry-run.
        "$program" -resume -run reference -dry-run "$flag=$other" > out 2> err || status=$?
        if [[ $changeable =~ (^|[[:space:]])$flag([[:space:]]|$) ]]; then
            taken=$((taken + 1))
            ((status == 0)) || { echo "$flag=$other: exit code $status: $(cat err)"; bad=1; }
        else
            refused=$((refused + 1))
            [[ $value == null ]] && value=none
            if ((status != 2)) || [[ $(wc -l < err) != 1 ]] ||
                ! grep -q -F -e "error: $flag cannot change when a run goes on: the run has $value, found " err ||
                ! grep -q -F -e "$other" err; then
                echo "$flag=$other: exit code $status: $(cat err)"
                bad=1
            fi
        fi
    done < <(sed -n 's/^  "\([a-z0-9_]*\)": \(.*[^,]\),*$/\1 \2/p' settings)
    echo "$taken taken, $refused refused"
    ((bad == 0 && taken == 17 && refused >= 20))
}
each_flag > output 2>&1
count 'each flag that differs from the run' $?
steps_do_not_go_down() {
    ends_with 2 "$program" -resume -run reference -steps $((steps - 1)) || return
    grep -q "error: -steps cannot go down when a run goes on: the run has $steps, found $((steps - 1));" err
}
steps_do_not_go_down > output 2>&1
count '-steps does not go down' $?
finish
