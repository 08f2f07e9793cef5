#!/usr/bin/env bash
# test_not_finite.sh - numbers that are not finite: a step that has one moves nothing and is named, the run goes
# on, three in a row end it, and no model that holds one is ever saved, nor loaded. Takes the program's path,
# beside which tests/faulty_train_gpt was built; at last "not_finite: N passed, N failed, N skipped".
# shellcheck disable=SC2086 # lists of flags are words
set -u
# shellcheck source-path=SCRIPTDIR source=lib.sh
. "$(dirname "$0")/lib.sh"
start_tests not_finite "$@"
fresh=(run straight before)

# Looked at by another program: no number of any checkpoint is NaN or infinite.
all_finite() {
    local file
    for file in "$1"/checkpoints/*/{model,optimizer}.safetensors; do
        if od -A n -v -t fF "$file" | grep -q -i -E 'nan|inf'; then
            echo "$file is poisoned"
            return 1
        fi
    done
}

stories 20 > stories.txt
small="-data stories.txt -vocab 257 -device cpu -threads 1 -layers 1 -heads 2 -channels 16 -ctx 16 -batch 2 -dropout 0.1
    -eval-every 0 -eval-tokens 32 -samples 0 -checkpoint-every 1 -keep 99"

# ---- a checkpoint with a poisoned number, and a MANIFEST that knows it ----
ends_with 0 "$program" $small -steps 4 -run reference || { cat err; exit 1; }
crc32() { gzip -c "$1" | tail -c 8 | od -A n -t x4 -N 4 | tr -d ' '; }
# The last number of a file of tensors becomes these four bytes; the CRC-32s in MANIFEST are made right.
poison() { # CHECKPOINT FILE BYTES
    local size
    size=$(wc -c < "$1/$2")
    printf '%b' "$3" | dd of="$1/$2" bs=1 seek=$((size - 4)) conv=notrunc status=none
    sed "/^end /d; s/^\([0-9]*\) [0-9a-f]* $2\$/\1 $(crc32 "$1/$2") $2/" "$1/MANIFEST" > manifest
    printf 'end %s\n' "$(crc32 manifest)" >> manifest
    differs manifest "$1/MANIFEST"
    cp manifest "$1/MANIFEST"
}
poisoned_weight() {
    cp -r reference run
    poison "$(step_of run 4)" model.safetensors "$1"
    cp -r run before
    for how in '-resume -run run' '-resume -run run -steps 9' '-generate -load run' '-evaluate -load run' \
        "-load $(step_of run 4) $small -steps 2 -run never"; do
        ends_with 1 "$program" $how
        [[ $(wc -l < err) == 1 ]]
        holds err "^train_gpt: error: number 15 of tensor ln_f.bias of .*step-00000004/model.safetensors is $2, "
        [[ ! -e never ]]
    done
    diff -r -x lock before run
    rm -r before "$(step_of run 4)" # as the message says
    ends_with 0 "$program" -resume -run run
    same_state "$(step_of reference 4)" "$(step_of run 4)"
}
poisoned_moment() {
    cp -r reference run
    poison "$(step_of run 4)" optimizer.safetensors '\0\0\300\177'
    ends_with 1 "$program" -resume -run run -steps 9
    holds err 'number 15 of tensor v.ln_f.bias of .*step-00000004/optimizer.safetensors is nan, '
    ends_with 0 "$program" $small -load "$(step_of run 4)" -steps 1 -run fresh # which it is no part of
}
run_as 'a weight that is NaN' poisoned_weight '\0\0\300\177' nan
run_as 'a weight that is infinite' poisoned_weight '\0\0\200\377' -inf
run_as 'a moment that is NaN' poisoned_moment

# ---- a learning rate that destroys the model ----
# Whatever comes of it: either the run ends after three steps that are not finite, each of them named, or it gets
# to its end; what is saved can be loaded.
destroyed() {
    local status=0 bad
    "$program" $small -steps 60 -lr 1e6 -warmup 0 -run run "$@" > out 2> err || status=$?
    all_finite run
    bad=$(grep -c ' is not finite[;,]' err) || true
    if ((status == 1)); then
        tail -n 1 run/log.jsonl | grep -q '"reason":"failed: step [0-9]*: the .* is not finite'
        holds err '^train_gpt: error: step [0-9]*: .* is not finite, as in the 2 before; '
        ((bad >= 3)) || { echo "$bad steps are named"; cat err; return 1; }
        status=0
        "$program" -resume -run run > out 2> err || status=$?
        ((status == 1 || status == 0))
        all_finite run
    else
        ((status == 0)) || { echo "exit code $status: $(cat err)"; return 1; }
    fi
}
run_as '-lr 1e6' destroyed
run_as '-lr 1e6 without clipping' destroyed -clip 0
run_as '-lr 1e6 without weight decay' destroyed -weight-decay 0
run_as '-lr 1e6 at learned positions' destroyed -position learned -clip 0
run_as '-lr 1e9' destroyed -lr 1e9
run_as '-lr 1e9 without clipping and weight decay' destroyed -lr 1e9 -clip 0 -weight-decay 0
# ---- a number in a step ----
# A constant learning rate, so that runs of several lengths compare.
constant="$small -lr 4e-3 -min-lr 4e-3 -warmup 2"
left_out() { # WHERE NAMED
    ends_with 0 env FAULTS="$1" "$faulty" $constant -steps 6 -run run
    [[ $(wc -l < err) == 1 ]]
    holds err "^train_gpt: note: step 6: $2 is not finite; the step's update was left out\$"
    # Weights, moments and the count of updates are those of the step before.
    same_state "$(step_of run 5)" "$(step_of run 6)"
    grep -q '"updates": 5,' "$(step_of run 6)/state.json"
    # The run goes on, and learns.
    ends_with 0 "$program" -resume -run run -steps 9
    [[ ! -s err ]]
    grep -q '"updates": 8,' "$(step_of run 9)/state.json"
    differs "$(step_of run 6)/model.safetensors" "$(step_of run 9)/model.safetensors"
    all_finite run
    grep -q '"type":"step","step":6,.*null' run/log.jsonl
    [[ $(grep -c '"type":"step"' run/log.jsonl) == 9 ]]
    # It is the run that was not stopped.
    rm -rf straight
    ends_with 0 env FAULTS="$1" "$faulty" $constant -steps 9 -run straight
    [[ ! -e $(step_of straight 6) ]] # no checkpoint of a step that was left out, but at an end
    same_state "$(step_of run 9)" "$(step_of straight 9)"
}
two_go_on() {
    ends_with 0 env FAULTS='gradient:3:nan gradient:4:nan gradient:6:inf gradient:7:inf' "$faulty" \
        $constant -steps 9 -run run
    [[ $(grep -c 'is not finite; the step' err) == 4 && $(wc -l < err) == 4 ]]
    grep -q '"updates": 5,' "$(step_of run 9)/state.json"
    all_finite run
}
three_end_it() {
    ends_with 1 env FAULTS='gradient:4:nan loss:5:inf gradient:6:-inf/4' "$faulty" $constant -steps 9 -run run
    [[ $(grep -c 'note: step [45]: the .* is not finite; the step' err) == 2 && $(wc -l < err) == 3 ]]
    holds err '^train_gpt: error: step 6: the gradient of h.0.attn.c_attn.bias is not finite, as in the 2 before'
    [[ $(newest run) == 3 ]]
    all_finite run
    tail -n 1 run/log.jsonl | grep -q '^{"type":"end","step":6,"reason":"failed: step 6: '
    # What goes on from there is a run without the faults.
    ends_with 0 "$program" -resume -run run
    ends_with 0 "$program" $constant -steps 9 -run straight
    same_state "$(step_of run 9)" "$(step_of straight 9)"
}
# A weight that is lost in a step that was applied: that step is saved no more, the next three end the run.
lost_weight() {
    ends_with 1 env FAULTS="weight:4:$1" "$faulty" $constant -steps 9 -run run
    holds err "note: the model is not saved: number 0 of tensor $2 is $3, not finite; the training goes on"
    [[ $(grep -c 'note: step [56]: .* is not finite; the step' err) == 2 && $(wc -l < err) == 4 ]]
    holds err '^train_gpt: error: step 7: '
    [[ $(newest run) == 3 ]]
    all_finite run
    # Stopped before the loss is seen: what was not saved is an error.
    ends_with 1 env FAULTS="weight:4:$1 step:4:INT" "$faulty" $constant -steps 9 -run straight
    holds err '^train_gpt: error: the model is not saved: number 0 of tensor'
    [[ $(newest straight) == 3 ]]
}
# The count of those in a row goes on with the run.
three_with_a_stop_between() {
    ends_with 130 env FAULTS='gradient:4:nan gradient:5:nan step:5:INT' "$faulty" $constant -steps 9 -run run
    [[ $(newest run) == 5 ]]
    same_state "$(step_of run 3)" "$(step_of run 5)"
    cp -r run stopped
    ends_with 1 env FAULTS='gradient:6:nan' "$faulty" -resume -run run
    holds err '^train_gpt: error: step 6: .* is not finite, as in the 2 before'
    [[ $(newest run) == 5 ]]
    ends_with 0 env FAULTS='gradient:7:nan' "$faulty" -resume -run stopped
    all_finite stopped
}
# Weights that are finite, but too large to compute with: a run does not end well with them, none that it evaluates
# is saved, and none of them is advised.
lost_loss() {
    ends_with 1 env FAULTS='weight:4:3e38/13 weight:4:3e38/14' "$faulty" $constant -steps 4 -run run
    [[ $(wc -l < err) == 1 && $(newest run) == 3 ]]
    holds err '^train_gpt: error: step 4: the held-out loss is not finite; start a new run with a lower -lr'
    tail -n 1 run/log.jsonl | grep -q '"type":"end","step":4,"reason":"failed: step 4: the held-out loss'
    lacks out 'nan\|done in'
    ends_with 1 env FAULTS='weight:4:3e38/13 weight:4:3e38/14' "$faulty" $constant -eval-every 4 -steps 9 -run straight
    holds err '^train_gpt: note: step 4: the held-out loss is not finite$'
    [[ $(newest straight) == 3 ]]
    # Saved where it was not evaluated, as its weights are finite.
    rm -rf run
    ends_with 1 env FAULTS='weight:4:3e38/13 weight:4:3e38/14' "$faulty" $constant -steps 9 -run run
    ends_with 1 "$program" -evaluate -load "$(step_of run 4)"
    [[ ! -s out && $(grep -c error: err) == 1 ]]
    holds err 'error: the model .*step-00000004 is of no use: its held-out loss is not finite; '
    ends_with 1 "$program" -generate -load "$(step_of run 4)"
    holds err 'error: the model .*step-00000004 is of no use: its logits are not finite; '
}
# The best model is advised only where it is better than what the run began with.
best_is_advised() {
    ends_with 1 env FAULTS='loss:4:nan loss:5:nan loss:6:nan' "$faulty" $constant -eval-every 1 -steps 9 -run run
    holds err 'from this one.s best model by -load or from none$'
    ends_with 1 env FAULTS='loss:4:nan loss:5:nan loss:6:nan' "$faulty" $small -lr 100 -warmup 0 -eval-every 1 \
        -steps 9 -run straight
    holds err 'from new weights: this one.s best model is no better than they$'
}
if [[ -x $faulty ]]; then
    run_as 'a held-out loss that is not finite' lost_loss
    run_as 'the best model is advised where it is one' best_is_advised
    run_as 'a gradient that is NaN' left_out gradient:6:nan/2 'the gradient of h.0.ln_1.bias'
    run_as 'a gradient that is infinite' left_out gradient:6:inf/0 'the gradient of wte.weight'
    run_as 'a gradient that is -infinite' left_out gradient:6:-inf/14 'the gradient of ln_f.bias'
    run_as 'the first of three is named' left_out 'gradient:6:nan/9 gradient:6:inf/3 gradient:6:nan/12' \
        'the gradient of h.0.attn.c_attn.weight'
    run_as 'a loss that is NaN' left_out loss:6:nan 'the loss'
    run_as 'a loss that is infinite' left_out loss:6:inf 'the loss'
    run_as 'two in a row, twice' two_go_on
    run_as 'three in a row' three_end_it
    run_as 'a weight that becomes NaN' lost_weight nan wte.weight nan
    run_as 'a weight that becomes infinite' lost_weight inf/6 h.0.attn.c_proj.bias inf
    run_as 'three in a row, a stop between' three_with_a_stop_between
else
    skip 'numbers in a step' "there is no $faulty (make test builds it on Linux)" 13
fi
finish
