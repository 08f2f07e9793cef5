#!/usr/bin/env bash
# test_program_cuda.sh - the program on a GPU, end to end: a run that was stopped and resumed is bit-equal to one
# that was not, and a GPU begins with the CPU's weights and sees its batches and dropout masks. Takes the program's
# path; ends with "program_cuda: N passed, N failed, N skipped". Skipped where the program finds no GPU.
set -u
# shellcheck source-path=SCRIPTDIR source=lib.sh
. "$(dirname "$0")/lib.sh"
start_tests program_cuda "$@"

# Heads of 32 channels, dropout on, two evaluations and a checkpoint on the way.
train=(-stories 200 -vocab 300 -layers 2 -heads 2 -channels 64 -ctx 64 -batch 8 -dropout 0.1 -deterministic
    -steps 6 -eval-every 2 -checkpoint-every 3 -keep 9 -sample-tokens 20 -eval-tokens 640)

"$program" "${train[@]}" -device cuda -dry-run >out 2>err || skip_all "$(cat err)"

# Weights, and AdamW's m and v.
same_model() {
    for file in model.safetensors optimizer.safetensors; do
        cmp "$1/checkpoints/step-$(printf %08d "$3")/$file" "$2/checkpoints/step-$(printf %08d "$3")/$file"
    done
}
same_log() {
    steps_of "$1" >steps-1
    steps_of "$2" >steps-2
    cmp steps-1 steps-2 || { diff steps-1 steps-2 | head -n 6; return 1; }
}

resume_is_bit_equal() {
    local straight=straight-$1 resumed=resumed-$1
    "$program" "${train[@]}" -device cuda -attention "$1" -run "$straight" >/dev/null
    cp -r "$straight" "$resumed"
    rm -r "$resumed"/checkpoints/step-0000000[46] # 4: a new best
    "$program" -resume -run "$resumed" >out
    grep -q 'going on after step 3' out
    same_model "$straight" "$resumed" 6
    same_log "$straight" "$resumed"
    [ "$(grep '"type":"eval"' "$straight/log.jsonl")" = "$(grep '"type":"eval"' "$resumed/log.jsonl")" ]
    [ "$(grep -c '"type":"step"' "$resumed/log.jsonl")" = 6 ]
}

# A real stop, wherever it comes, in a run of seconds.
a_stop_changes_nothing() {
    local long=("${train[@]}" -steps 3000 -eval-every 0 -checkpoint-every 0 -sample-every 0 -device cuda -attention "$1")
    local straight=long-$1 stopped=stopped-$1 status=0
    "$program" "${long[@]}" -run "$straight" >/dev/null
    "$program" "${long[@]}" -run "$stopped" >out 2>err &
    process=$!
    for _ in $(seq 1200); do
        grep -q '"step":5,' "$stopped/log.jsonl" 2>/dev/null && break
        sleep 0.05
    done
    kill -TERM $process
    wait $process || status=$?
    [ $status = 143 ] || say_and_fail "exit code $status, not 143, of a run that a SIGTERM stops: $(cat out err)"
    echo "stopped after $(grep -c '"type":"step"' "$stopped/log.jsonl") steps"
    "$program" -resume -run "$stopped" >/dev/null
    same_model "$straight" "$stopped" 3000
    same_log "$straight" "$stopped"
}

# With a learning rate of 0 the weights stay what they were, and the loss of a step is that of its batch and its
# dropout masks. Weights are equal to the bit. Losses and gradient norms are so but for rounding: in fp32 within
# 1e-5 and 1e-4 of themselves, some hundred roundings; in bf16 within 1e-3 and 5 %. Another seed, that is other
# windows and masks, changes the gradient norm by 13 to 27 %.
numbers_of() { grep '"type":"step"' "$1/log.jsonl" | sed 's/.*"loss":\([^,]*\),.*"grad_norm":\([^,]*\),.*/\1 \2/'; }
# near A B LOSS NORM: 0 where all steps agree.
near() {
    numbers_of "$1" >numbers-1
    numbers_of "$2" >numbers-2
    echo "losses and gradient norms of $1, of $2, their relative differences:"
    paste numbers-1 numbers-2 | awk -v loss="$3" -v norm="$4" '
        function off(a, b) { return (a > b ? a - b : b - a) / b }
        { if (!($1 > 0 && $3 > 0 && $2 > 0 && $4 > 0 && NF == 4)) { bad = 1; exit }
          print $0, off($1, $3), off($2, $4)
          if (off($1, $3) > loss || off($2, $4) > norm) bad = 1 }
        END { exit bad || NR != 6 }'
}
starts_like_the_cpu() {
    local still=("${train[@]}" -lr 0 -min-lr 0 -dropout 0.3)
    "$program" "${still[@]}" -device cpu -attention naive -run on-cpu >/dev/null
    "$program" "${still[@]}" -device cuda -precision fp32 -attention naive -run on-fp32 >/dev/null
    "$program" "${still[@]}" -device cuda -attention flash -run on-bf16 >/dev/null
    "$program" "${still[@]}" -device cpu -attention naive -seed 99 -run on-other >/dev/null
    for run in on-fp32 on-bf16; do
        cmp on-cpu/checkpoints/step-00000006/model.safetensors $run/checkpoints/step-00000006/model.safetensors
        cmp on-cpu/tokens/merges.txt $run/tokens/merges.txt
    done
    near on-cpu on-fp32 1e-5 1e-4
    near on-cpu on-bf16 1e-3 0.05
    if near on-cpu on-other 1e-3 0.05; then say_and_fail "another seed changes nothing"; fi
    if cmp on-cpu/checkpoints/step-00000006/model.safetensors on-other/checkpoints/step-00000006/model.safetensors; then
        say_and_fail "another seed begins with the same weights"
    fi
}

# 200 steps on the fast path (bf16, products with bias and GELU in their epilogues, recorded passes, flash) and on the
# plain one (fp32, each operation by itself, naive): the same weights at first, the same batches and masks. At equal
# weights the losses differ by bf16's rounding of the logits, at most 2^-9 of them and in the mean over 2,048 tokens
# less: 2^-9 of the loss is allowed. Gradients are rounded to 2^-9 at each of some ten operations, at random, so that
# AdamW's steps differ by about 2^-9 sqrt(10) of themselves and their sum, the way that the loss has come, by less:
# 2^-8 of it is allowed besides. (Scores of attention that are a fifth too small differ by half more than that, another
# seed by ten times as much; what changes the way less than that is found by the gradients' own tests.)
losses_of() { grep '"type":"step"' "$1/log.jsonl" | sed 's/.*"loss":\([^,]*\),.*/\1/'; }
# same_losses A B: 0 where they are equal so far at each of 200 steps.
same_losses() {
    losses_of "$1" >losses-1
    losses_of "$2" >losses-2
    paste losses-1 losses-2 | awk -v names="$1, $2" '
        function size(x) { return x < 0 ? -x : x }
        NF != 2 || !($1 > 0 && $2 > 0) { bad = 1; exit }
        NR == 1 { first = $1 }
        { off = size($1 - $2); allowed = $1 / 512 + size(first - $1) / 256
          if (off > allowed) bad++
          if (off > most) { most = off; at = NR; room = allowed } }
        END { printf "%s: largest difference %.5f, at step %d, where %.5f is allowed; from %.4f to %.4f; %d beyond\n", names,
                  most, at, room, first, $1, bad
              exit bad || NR != 200 }'
}
two_hundred_steps() {
    local long=(-stories 3000 -vocab 600 -layers 4 -heads 4 -channels 128 -ctx 128 -batch 16 -dropout 0.1 -lr 1e-3
        -steps 200 -eval-every 0 -sample-every 0 -checkpoint-every 0)
    "$program" "${long[@]}" -device cuda -precision fp32 -attention naive -run plain >/dev/null
    "$program" "${long[@]}" -device cuda -attention flash -run fast >/dev/null
    "$program" "${long[@]}" -device cuda -attention flash -seed 2 -run other >/dev/null
    same_losses plain fast
    if same_losses plain other; then say_and_fail "another seed is not told from this one"; fi
}

run_test resume_is_bit_equal flash
run_test resume_is_bit_equal naive
run_test a_stop_changes_nothing flash
run_test a_stop_changes_nothing naive
run_test starts_like_the_cpu
run_test two_hundred_steps
finish
