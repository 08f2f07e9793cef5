#!/usr/bin/env bash
# test_program_cuda.sh - the program on a GPU, end to end: a run that was stopped and resumed is bit-equal to one
# that was not, a GPU begins with the CPU's weights and sees its batches and dropout masks, and the fast path (bf16,
# flash, fused and recorded operations) trains like the plain one (fp32, naive). Takes the program's path; ends with
# "program_cuda: N passed, N failed, N skipped". Skipped where the program finds no GPU.
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

# 200 steps give the same losses on the fast path as on the plain one, and in bf16 with both kinds of attention.
#
# How far apart are they? bf16's unit roundoff is u = 2^-8, and two things are rounded:
#  - The norms' gains, together. They start at 1, around which bf16 has 1 - u, 1 and 1 + 2 u: of what AdamW has moved
#    them by, up to u is lost or added, and they are moved in the same way. To first order a loss changes by the sum of
#    gradient times rounding error: at most u times the gradient's sum of magnitudes over all 1,152 gains, which is
#    1.37 at most here, 5.4e-3. (Computed from a run in fp32, step by step, the sum is 2.1e-3 at step 31, and what
#    rounding the gains alone does is within 13 % of it in the root mean square.) Before the tenth step they have moved
#    by 1.1e-3 at most, the sum of the rates, and are read as 1; with a sum of 0.34 there: 3.8e-4, 1.2e-4 in fact.
#  - All else, each number with an error of its own, 0.4 u of it in the root mean square. Weights change a loss by at
#    most 0.4 u times their size (0.1) times the gradient's norm (1): 1.6e-4. Activations and logits change a token's
#    loss by a few times 0.4 u, the mean over 2,048 tokens by 1/45 of that: 1e-4. In fact 6e-5, both together.
# Does it grow? Each step adds errors to the weights, of random sign, and differences grow like the square root of the
# steps: 6e-5 becomes 5e-4. They grow faster only where the training itself amplifies them, which at this learning
# rate it does not: two orders of sums in fp32 differ by 1.3e-9 at step 1 and by 3e-8 at most, weights that are rounded
# to bf16 once, before the first step, by 1.6e-5 and 3.4e-4. At the usual rate for this width, 6e-3, these two become
# 5e-6 and 3e-2, and bf16 and fp32 differ by up to 6e-2, by another amount for each seed: as much as most errors in
# a gradient would do. So the rate is set.
# AdamW does not see a factor in a gradient; gradient norms do. Theirs differ by up to 2^-9 at first, since the targets'
# d_logits are then all just below the same power of 2 and rounded alike.
#
# The bounds are twice what the CPU's operations with bf16's roundings differ by at most, over five seeds: from fp32
# by 2.4e-3, in the first ten steps by 2.5e-4, norms there by 1.4e-3; naive from flash by 6.5e-4, 7.1e-5 and 3.5e-4.
# Faults planted there, in bf16 with flash, are beyond them: backward dropout masks of the next row at one place (by
# 7e-2), no gradient of q for the last 16 tokens (9e-3), none of one kind's biases (7e-3, 2e-2), of norms' gains
# (8e-2) or biases (2e-2), no GELU' in one layer (8e-2), rotary not turned back (2e-1), no clipping (5e-2), 2 % too
# much in the gradients of one kind of matrix (norms: 7e-3), of its inputs (1e-2), of v (8e-3), in the scale by which
# the backward pass makes scores again (naive from flash: 3e-3). Not beyond: 2 % in the gradient of q, 64 of 2,048
# rows missing from that of one matrix, one layer's bias. Each tensor is looked at in test_cuda and test_flash_cuda.
learn=(-stories 3000 -vocab 600 -layers 4 -heads 4 -channels 128 -ctx 128 -batch 16 -dropout 0.1 -steps 200 -lr 1e-3
    -eval-every 0 -eval-tokens 128 -checkpoint-every 0 -sample-every 0 -sample-tokens 1)
# apart A B EARLY ALL NORM: how far two runs' losses are apart in the first ten steps and in all of them, and their
# gradient norms, relatively, in the first ten: 0 where within these bounds, two ways, and both have learned. Says it
# in `said`.
apart() {
    numbers_of "$1" >numbers-1
    numbers_of "$2" >numbers-2
    paste numbers-1 numbers-2 | awk -v runs="$1 and $2" -v early="$3" -v all="$4" -v norm="$5" '
        function off(a, b) { return a > b ? a - b : b - a }
        !bad && !(NF == 4 && $1 + 0 > 0 && $2 + 0 > 0 && $3 + 0 > 0 && $4 + 0 > 0) { bad = NR; row = $0 }
        off($1, $3) > most { most = off($1, $3); at = NR }
        NR <= 10 && off($1, $3) > first { first = off($1, $3) }
        NR <= 10 && off($2, $4) > slope * $2 { slope = off($2, $4) / $2 }
        NR == 1 { start = $1 }
        { last = $1 > $3 ? $1 : $3 }
        END {
            printf "%s, %d steps: losses are %.1e apart at most, at step %d (allowed: %.1e); in the first ten", runs,
                NR, most, at, all
            printf " %.1e (%.1e), gradient norms %.1e (%.1e)\n", first, early, slope, norm
            if (bad) printf "step %d of both is \"%s\", not two losses and two gradient norms\n", bad, row
            if (!(last < 0.6 * start)) printf "they have not learned: from %g to %g\n", start, last
            if (most == 0) print "they are equal to the bit, so that they were not computed in two ways"
            exit bad || NR != 200 || !(last < 0.6 * start) || most == 0 || most > all || first > early || slope > norm
        }' >>said
}
fast_learns_like_plain() {
    local bad=0
    "$program" "${learn[@]}" -device cuda -precision fp32 -attention naive -run fp32-naive >/dev/null
    "$program" "${learn[@]}" -device cuda -attention naive -run bf16-naive >/dev/null
    "$program" "${learn[@]}" -device cuda -attention flash -run bf16-flash >/dev/null
    apart fp32-naive bf16-flash 5e-4 5e-3 3e-3 || bad=1
    apart fp32-naive bf16-naive 5e-4 5e-3 3e-3 || bad=1
    apart bf16-naive bf16-flash 1.5e-4 1.5e-3 7e-4 || bad=1
    return $bad
}

run_test resume_is_bit_equal flash
run_test resume_is_bit_equal naive
run_test a_stop_changes_nothing flash
run_test a_stop_changes_nothing naive
run_test starts_like_the_cpu
run_test fast_learns_like_plain
[ ! -f said ] || sed 's/^/  /' said
finish
