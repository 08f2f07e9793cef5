#!/usr/bin/env bash
# test_resume.sh - resuming changes nothing: a run that was stopped after k steps and gone on with ends with the
# bits of one that was not: weights, optimizer, state, every row of the log (but for times), at 20 places of a run
# of several epochs with dropout, evaluations and stories between, stopped by a signal, by -steps, by SIGKILL,
# again and again, and moved meanwhile. And no flag changes what belongs to the run. Takes the program's path,
# beside which tests/faulty_train_gpt was built; at last "resume: N passed, N failed, N skipped".
# shellcheck disable=SC2086 # lists of flags are words
set -u
# shellcheck source-path=SCRIPTDIR source=lib.sh
. "$(dirname "$0")/lib.sh"
start_tests resume "$@"

# 35 windows of 16 tokens, 2 a step: an epoch ends within step 18 and with step 35. The held-out story, the last,
# is another kind of story, so that its loss rises again.
stories 19 > stories.txt
echo 'Tom saw two cats; Lily ran to the pond' >> stories.txt
steps=50
small="-data stories.txt -vocab 257 -device cpu -threads 1 -layers 2 -heads 2 -channels 16 -ctx 16 -batch 2 -dropout 0.1
    -lr 4e-2 -warmup 5 -eval-every 3 -eval-tokens 32 -sample-every 7 -samples 9 -sample-tokens 4
    -checkpoint-every 4"

state() { sed '/"seconds"/d' "$1/state.json"; }
last() { step_of "$1" $steps; }
best() { sed -n 's/.*"best_step": \([0-9]*\).*/\1/p' "$(last "$1")/state.json"; }

# Everything that a run leaves: model, optimizer, where it stands, its best, its log.
is_same() {
    local type step
    same_state "$(last reference)" "$(last "$1")" || return
    diff <(state "$(last reference)") <(state "$(last "$1")") || return
    step=$(best reference)
    cmp "$(step_of reference "$step")/model.safetensors" "$(step_of "$1" "$step")/model.safetensors" || return
    for type in step eval sample; do
        diff <(rows reference $type) <(rows "$1" $type) || { echo "rows of type $type"; return 1; }
    done
    [[ $(grep -c '"type":"end"' "$1/log.jsonl") == 1 ]]
}

run_as 'the run without a stop' ends_with 0 "$program" $small -steps $steps -run reference
((failed == 0)) || { finish; exit; }
# The best is that of all evaluations after a step, and for what follows neither the first nor the last.
lowest() { rows "$1" eval | awk -F'[:,]' '$4 > 0 { print $6, $4 }' | sort -g | sed -n '1s/.* //p'; }
best_in_the_middle() {
    [[ $(best reference) == "$(lowest reference)" ]] || say_and_fail "the best is $(best reference), not $(lowest reference)"
    [[ $(best reference) -gt 3 && $(best reference) -lt $steps ]] || say_and_fail "the best is $(best reference)"
    holds out '^  an epoch *35 windows'
}
run_as 'the run has a best in its middle, and epochs of 35 windows' best_in_the_middle

# ---- a signal, SIGKILL ----
stopped_at() { # CODE FAULTS STEPS-THAT-ARE-SAVED
    rm -rf stopped moved
    ends_with "$1" env FAULTS="$2" "$faulty" $small -steps $steps -run stopped || return
    [[ -z $3 || -d $(step_of stopped "$3") ]] || { ls stopped/checkpoints; return 1; }
    mv stopped moved || return
    ends_with 0 "$program" -resume -run moved || return
    [[ ! -s err ]] || { cat err; return 1; }
    is_same moved
}
if [[ -x $faulty ]]; then
    signals=(INT TERM USR1) codes=(130 143 138)
    for k in 1 2 3 6 7 8 12 14 17 18 19 21 24 28 34 35 36 42 48 49; do
        i=$((k % 3))
        run_as "stopped by SIG${signals[i]} in step $k" stopped_at ${codes[i]} step:$k:${signals[i]} $k
        run_as "killed in step $k" stopped_at 137 step:$k:KILL ''
    done
    for k in 3 21 42 $steps; do
        run_as "stopped in the evaluation after step $k" stopped_at 130 evaluation:$k:INT $k
    done
    for k in 7 14 21 42 $steps; do
        run_as "stopped in the stories after step $k" stopped_at 143 sampling:$k:TERM $k
    done
    for k in 4 12 28 $steps; do
        run_as "stopped while step $k is saved" stopped_at 138 saving:$k:USR1 $k
        run_as "killed while step $k is saved" stopped_at 137 saving:$k:KILL ''
    done
    run_as 'stopped in the evaluation before the first step' stopped_at 130 evaluation:0:INT ''

    many_times() {
        rm -rf stopped
        ends_with 130 env FAULTS=step:2:INT "$faulty" $small -steps $steps -run stopped || return
        for fault in step:3:INT step:9:INT sampling:14:INT step:21:INT evaluation:24:INT step:30:INT step:42:INT \
            step:43:INT rehearsal:0:INT evaluation:48:INT saving:$steps:INT; do
            ends_with 130 env FAULTS=$fault "$faulty" -resume -run stopped || return
        done
        ends_with 0 "$program" -resume -run stopped && is_same stopped
    }
    run_as 'stopped twelve times' many_times
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
    run_as 'killed while the rest of a step is done' killed_in_the_rest
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
    same_state "$(last reference)" "$(last raised)" || return
    diff <(rows reference step) <(rows raised step) && diff <(reference_rows reference) <(reference_rows raised)
}
mv reference cosine
run_as 'the run with a constant learning rate' ends_with 0 "$program" $small -min-lr 4e-2 -steps $steps -run reference
for k in 1 2 3 4 5 7 9 12 14 17 18 19 21 25 29 34 35 42 45 49; do
    run_as "-steps $k, then -steps $steps" raised_from $k
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
run_as '-minutes' minutes_are_fixed_once
# Few steps fit: the warm-up is cut, and who goes on from before that is known still rises as the run did. How much
# work a step must be for that hangs on the machine.
a_cut_warmup() {
    local few="-stories 50 -vocab 300 -device cpu -threads 1 -layers 1 -heads 1 -channels 32 -ctx 32 -micro 16
        -eval-tokens 64 -samples 0 -minutes 0.03 -keep 1000000 -checkpoint-every 1" batch last steps
    for batch in 16 64 256 1024; do
        rm -rf reference again
        ends_with 0 "$program" $few -batch $batch -run reference || return
        steps=$(sed -n 's/.*"steps": \([0-9]*\),.*/\1/p' reference/run.json)
        ((steps >= 250)) || break
    done
    ((steps > 3 && steps < 250)) || { echo "$steps steps at batch $batch"; return 1; }
    cp -r reference again
    find again/checkpoints -name 'step-*' | sort | tail -n +3 | xargs rm -r
    ends_with 0 "$program" -resume -run again || return
    last=$(newest reference)
    cmp "$(step_of reference "$last")/model.safetensors" "$(step_of again "$last")/model.safetensors"
}
run_as '-minutes, its warm-up cut' a_cut_warmup
rm -rf reference again
mv cosine reference

# ---- flags ----
# A value that differs from the run's, for every flag of the table that is a setting; those that may change are
# taken, all others refused with both values.
changeable='-attention -deterministic -micro -steps -eval-every -sample-every -samples -prompt -sample-tokens
    -temperature -top-k -top-p -checkpoint-every -keep -device -precision -threads -timeout'
help_lists_them() {
    diff <(printf '%s\n' $changeable) <("$program" -help | sed -n '/^when a run goes on/,/^$/p' | grep -o -e '-[a-z][a-z-]*')
}
run_as '-help lists what may change' help_lists_them
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
    min_lr) echo 0.001 ;;
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
            [[ $value =~ ^[0-9.e-]+$ ]] && value=$(printf '%.15g' "$value") # shorter where it is the same number
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
run_as 'each flag that differs from the run' each_flag
steps_do_not_go_down() {
    ends_with 2 "$program" -resume -run reference -steps $((steps - 1)) || return
    grep -q "error: -steps cannot go down when a run goes on: the run has $steps, found $((steps - 1));" err
}
run_as '-steps does not go down' steps_do_not_go_down
finish
