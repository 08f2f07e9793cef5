#!/usr/bin/env bash
# test_program.sh - the program end to end, by what a user sees: exit codes, output, files. Takes the program's
# path; prints what failed, and at last "program: N passed, N failed, N skipped".
#
# The runs are tiny (2 layers, 32 channels, a few steps), and most tests look at the same one, $tmp/run.
# shellcheck disable=SC2086 # lists of flags are words
set -u
# shellcheck source-path=SCRIPTDIR source=lib.sh
. "$(dirname "$0")/lib.sh"
start_tests program "$@"

model_of() { echo "$(step_of "$1" "$2")/model.safetensors"; } # RUN N

# 300 small stories, and a run on them: 6 steps, a checkpoint after 3, dropout on.
awk 'BEGIN {
    split("Anna Ben Lily Tom", who); split("ball hat bird cake", what); split("found lost saw wanted", did)
    for (i = 0; i < 300; i++) {
        if (i) printf "\n<|endoftext|>\n"
        for (j = 0; j < 5; j++)
            printf "%s %s a %s. ", who[(i * 7 + j * 3) % 4 + 1], did[(i * 5 + j) % 4 + 1], what[(i + j * j) % 4 + 1]
    }
}' >stories.txt
small="-threads 1 -layers 2 -heads 2 -channels 32 -ctx 32 -batch 4 -vocab 300 -sample-tokens 20 -eval-tokens 320"
train="-data stories.txt $small -dropout 0.1 -steps 6 -eval-every 2 -checkpoint-every 3 -keep 9"

trains() {
    "$program" $train -run run >out 2>err
    [ ! -s err ] || say_and_fail "stderr: $(cat err)"
    grep -q '^step 6/6 ' out
    grep -q '^step 6  held-out loss ' out
    lacks out 'MFU n/a'
    for file in run.json log.jsonl report.html tokens/merges.txt tokens/data.json; do [ -s run/$file ]; done
    for step in 3 6; do
        for file in model.safetensors optimizer.safetensors config.json tokenizer.json merges.txt state.json MANIFEST; do
            [ -s "run/checkpoints/step-0000000$step/$file" ]
        done
    done
    [ "$(grep -c '"type":"step"' run/log.jsonl)" = 6 ]
    [ "$(grep -c '"type":"eval"' run/log.jsonl)" = 4 ] # 0, 2, 4, 6
    tail -n 1 run/log.jsonl | grep -q '^{"type":"end","step":6,"reason":"done"'
}

log_is_json() {
    needs_python
    python3 - run/log.jsonl run/run.json <<'PYTHON'
import json, math, sys
rows = [json.loads(line) for line in open(sys.argv[1])]
assert [row["type"] for row in rows].count("start") == 1 and rows[0]["type"] == "start", rows[0]
assert all(next(iter(row)) == "type" for row in rows)
steps = [row for row in rows if row["type"] == "step"]
assert [row["step"] for row in steps] == [1, 2, 3, 4, 5, 6]
keys = ["type", "step", "loss", "lr", "grad_norm", "ms", "tokens_per_s", "mfu", "tokens"]
assert all(list(row) == keys for row in steps), steps[0]
assert all(row["tokens"] == row["step"] * 128 and math.isfinite(row["loss"]) for row in steps)
evals = [row for row in rows if row["type"] == "eval"]
assert [row["step"] for row in evals] == [0, 2, 4, 6] and all(row["tokens"] == 320 for row in evals)
assert all(row["floor"] is None and row["bits_per_byte"] > 0 for row in evals)
assert evals[0]["loss"] < 1.3 * math.log(300) and evals[-1]["loss"] < evals[0]["loss"]
assert any(row["type"] == "sample" and row["step"] == 6 and isinstance(row["text"], str) for row in rows)
start = rows[0]
assert start["attention"]["kernel"] == "flash" and start["memory_bytes"]["total"] > 0
settings = json.load(open(sys.argv[2]))
assert settings["steps"] == 6 and settings["version"] == start["version"] and settings["micro"] == 4, settings
assert "run" not in settings
PYTHON
}

runs_twice_the_same() {
    "$program" $train -run again >/dev/null
    cmp "$(model_of run 6)" "$(model_of again 6)"
    [ "$(steps_of run)" = "$(steps_of again)" ]
}

resume_is_bit_equal() {
    cp -r run resumed
    rm -r resumed/checkpoints/step-0000000[46]
    "$program" -resume -run resumed >out
    grep -q 'going on after step 3' out
    same_state "$(step_of run 6)" "$(step_of resumed 6)"
    [ "$(steps_of run)" = "$(steps_of resumed)" ]
    [ "$(grep '"type":"eval"' run/log.jsonl)" = "$(grep '"type":"eval"' resumed/log.jsonl)" ]
}

resume_of_a_finished_run() {
    cp -r run finished
    "$program" -resume -run finished >out # nothing left to do
    grep -q 'nothing is left' out
    [ "$(grep -c '"type":"step"' finished/log.jsonl)" = 6 ]
    "$program" -resume -run finished -steps 8 >out
    grep -q '^step 8/8 ' out
    [ "$(grep -c '"type":"step"' finished/log.jsonl)" = 8 ]
    # What the program had chosen for the old number of steps is chosen again; what the user gave stays.
    holds finished/run.json '"eval_every": 2,'
    holds finished/run.json '"warmup": 1,'
    "$program" -resume -run finished -steps 20 >out
    holds finished/run.json '"eval_every": 2,'
    holds finished/run.json '"warmup": 4,'
    grep -q '"sample_every": 5,' finished/run.json
}

resume_passes_over_damage() {
    cp -r run damaged
    rm -r damaged/checkpoints/step-0000000[24]
    file=$(model_of damaged 6)
    printf '\377\377' | dd of="$file" bs=1 seek=3000 conv=notrunc status=none
    "$program" -resume -run damaged >out 2>err
    grep -q 'passed over a damaged checkpoint.*step-00000006' err
    grep -q 'going on after step 3' out
    cmp "$(model_of run 6)" "$(model_of damaged 6)"
    # None that is good is an error, not a new beginning.
    for step in 3 4 6; do printf '\377\377' | dd of="$(model_of damaged $step)" bs=1 seek=3000 conv=notrunc status=none; done
    refused 1 damaged -resume -run damaged
}

resume_keeps_what_is_fixed() {
    refused 2 '-layers cannot change' -resume -run run -layers 3
    refused 2 '-batch cannot change' -resume -run run -batch 8
    refused 2 'give one of them' -resume -force -run run
    # The same command again goes on.
    cp -r run same
    "$program" $train -run same -resume | grep -q 'nothing is left'
}

resume_may_start_a_run() {
    "$program" $train -run begun -resume >/dev/null
    cmp "$(model_of run 6)" "$(model_of begun 6)"
}

a_signal_saves() {
    "$program" -data stories.txt $small -dropout 0.1 -steps 100000 -eval-every 0 -run long >out 2>err &
    process=$!
    until_step long 5
    refused 1 'in use' -resume -run long
    stops INT $process 130
    grep -q 'stopped by SIGINT after step' out
    grep -q 'finishing the step; once more to stop at once' err
    step=$(newest long)
    [ "$(grep -c '"type":"step"' long/log.jsonl)" = "$step" ]
    tail -n 1 long/log.jsonl | grep -q '"reason":"SIGINT"'
    # SIGTERM, in a run that goes on.
    "$program" -resume -run long >out 2>err &
    process=$!
    until_step long $((step + 2))
    stops TERM $process 143
    steps_of long | sed 's/.*"step":\([0-9]*\),.*/\1/' >numbers # each step once, in order
    seq "$(wc -l <numbers)" | cmp - numbers
}

run_folders() {
    refused 1 'holds a run' $train -run run
    cp -r run old
    "$program" $train -steps 1 -run old -force >/dev/null
    cmp "$(model_of run 6)" "$(model_of old.old-1 6)"
    [ "$(grep -c '"type":"step"' old/log.jsonl)" = 1 ]
    mkdir other
    touch other/mine
    refused 1 'not empty' $train -run other
    refused 1 "" $train -run stories.txt/under-a-file
    # A run can be moved.
    mv old moved
    "$program" -generate -load moved -sample-tokens 5 >out 2>err
    "$program" -resume -run moved -steps 2 >out
    # Without -run: a new folder under runs/, and without -load the newest.
    "$program" $train -steps 1 >out
    [ "$(find runs -mindepth 1 -maxdepth 1 | wc -l)" = 1 ]
    "$program" -generate -sample-tokens 5 >out 2>err
}

other_ways_to_the_same_model() {
    # Shards used where they lie, and tokens made in a call of their own: the same tokens, the same model.
    "$program" $train -data 'run/tokens/train-*.bin' -heldout 'run/tokens/heldout-*.bin' -run in-place >/dev/null
    cmp "$(model_of run 6)" "$(model_of in-place 6)"
    "$program" -tokenize -data stories.txt -vocab 300 -run tokenized >/dev/null
    [ -s tokenized/tokens/data.json ]
    [ ! -e tokenized/checkpoints ]
    "$program" $train -run tokenized -resume >/dev/null
    cmp "$(model_of run 6)" "$(model_of tokenized 6)"
    cp tokenized/run.json before.json
    refused 2 'tokenized has begun; leave -tokenize out' -tokenize -resume -run tokenized
    refused 2 'name that by -tokenizer tokenized' -tokenize -load tokenized -data stories.txt -run never
    refused 2 'holds shards, not text' -data tokenized/tokens $small -steps 1 -run never
    ends_with 2 "$program" -evaluate -load tokenized -heldout tokenized/tokens
    holds err 'holds shards, not text'
    [ ! -e never ]
    cmp tokenized/run.json before.json
    # Both ways to a ready tokenizer, with a number of tokens that is not its own.
    local ready="the tokenizer run/tokens/merges.txt has [0-9]* tokens; leave the flag out"
    refused 2 "-vocab 999: $ready" $train -vocab 999 -tokenizer run -run never
    refused 2 "-vocab 999: $ready" $train -vocab 999 -data 'run/tokens/train-*.bin' \
        -heldout 'run/tokens/heldout-*.bin' -run never
    [ ! -e never ]
    # Other kernels and micro-batches: the same but for rounding.
    "$program" $train -attention naive -micro 3 -run naive >out
    grep -q 'naive' out
    refused 2 "no-such" $train -attention no-such -run never
    [ ! -e never ]
}

loading_a_model() {
    "$program" $train -load run -steps 1 -run loaded >out
    grep -q 'weights .*run/checkpoints/step-' out
    refused 2 'the loaded model has 2' $train -load run -layers 3 -run never
    refused 1 'holds no model' $train -load stories.txt -run never
    refused 1 'holds no model' -generate -load nowhere
    [ ! -e never ]
}

generating() {
    "$program" -generate -load run -samples 3 -seed 5 -sample-tokens 30 >one 2>err
    "$program" -generate -load run -samples 3 -seed 5 -sample-tokens 30 >two 2>/dev/null
    "$program" -generate -load run -samples 3 -seed 6 -sample-tokens 30 >three 2>/dev/null
    [ -s one ]
    cmp one two
    differs one three
    "$program" -generate -load run -prompt 'Anna found' -sample-tokens 200 -temperature 0 >out 2>err # past -ctx
    grep -q '^Anna found' out
    "$program" -generate -load run/checkpoints/step-00000003 -prompt '<|endoftext|>' -sample-tokens 2 >out 2>err
    grep -q '^<|endoftext|>' out # ordinary text
    "$program" -generate -load run -prompt '' -samples 3 -seed 5 -sample-tokens 30 2>err | cmp - one
    cp -r run worn
    printf '\377\377' | dd of="$(model_of worn 6)" bs=1 seek=3000 conv=notrunc status=none
    for mode in -generate -evaluate; do
        "$program" $mode -load worn -sample-tokens 5 >out 2>err
        grep -q 'passed over a damaged checkpoint.*step-00000006' err
    done
    "$program" -generate -load run -samples 0 >out 2>err
    [ ! -s out ]
    # Nobody reads any more: quiet, exit code 1.
    "$program" -generate -load run -samples 2000 -sample-tokens 500 2>err | head -c 1 >/dev/null
    status=${PIPESTATUS[0]}
    [ "$status" = 1 ]
    lacks err error
}

# What a run tells to type next can be typed, for a shape that only naive can run, too.
next_commands() {
    local next
    "$program" $train -steps 2 -attention naive -channels 24 -run odd >out # heads of 12 channels
    grep -E '^(stories|loss|go on) ' out | sed 's/^[a-z ]*  *\([^ ]*train_gpt\)/\1/' >commands
    [ "$(wc -l <commands)" = 3 ]
    while read -r next; do
        $next >told 2>err || say_and_fail "$next: $(cat err)"
        [ -s told ]
    done <commands
    cp -r odd/checkpoints/step-00000002 alone # which says nothing of attention
    "$program" -generate -load alone -sample-tokens 3 >told 2>err
    # What was asked for is not replaced, and neither is what is trained with.
    refused 2 'attention flash cannot run this shape' -generate -load odd -attention flash
    refused 2 'attention flash cannot run this shape' $train -steps 2 -channels 24 -run never
    refused 2 'attention flash cannot run this shape' -resume -run odd -steps 6 -attention flash
    [ ! -e never ]
}

evaluating() {
    "$program" -evaluate -load run >all 2>err
    [ "$(wc -l <all)" = 1 ]
    grep -q '^held-out loss [0-9.]* nats/token  [0-9.]* bits/byte  over [0-9,]* tokens' all
    for batch in 1 2 16; do
        "$program" -evaluate -load run -batch $batch -micro 1 >out 2>err
        cmp out all
    done
    "$program" -evaluate -load run -micro 5 -batch 5 >out 2>err
    cmp out all
    # The value of the last evaluation in training is that of the same tokens here.
    "$program" -evaluate -load run/checkpoints/step-00000006 -eval-tokens 320 >out 2>err
    loss=$(sed 's/held-out loss \([0-9.]*\) .*/\1/' out)
    grep '"type":"eval","step":6,' run/log.jsonl | grep -q "\"loss\":${loss%?}"
    "$program" -evaluate -load run -heldout stories.txt >out 2>err
    grep -q '^held-out loss' out
    "$program" -evaluate -load run -heldout 'run/tokens/heldout-*.bin' >out 2>err
    cmp out all
}

encoding() {
    { printf 'Anna\r\n\0 \377\376 h\303\251 \360\237\230\200 <|endoftext|>'; head -c 3000 "$program"; } >nasty
    "$program" -encode -tokenizer run <nasty >ids
    "$program" -decode -tokenizer run <ids | cmp - nasty
    tr ' ' '\n' <ids | "$program" -decode -tokenizer run/tokens/merges.txt | cmp - nasty
    printf 'Ben<|endoftext|>Ben' | "$program" -encode -special -tokenizer run >ids
    vocab=$(($(grep -vc '^#version' run/tokens/merges.txt) + 257))
    grep -q " $((vocab - 1)) " ids
    [ "$(printf 'Ben' | "$program" -encode -tokenizer run) $((vocab - 1)) $(printf 'Ben' | "$program" -encode -tokenizer run)" = "$(cat ids)" ]
    [ -z "$("$program" -encode -tokenizer run </dev/null)" ]
    [ -z "$("$program" -decode -tokenizer run </dev/null)" ]
    for bad in '1 2 x' '1,2' '-1' '99999' '99999999999999999999999'; do
        status=0
        echo "$bad" | "$program" -decode -tokenizer run >out 2>err || status=$?
        [ $status = 1 ]
        [ "$(wc -l <err)" = 1 ]
    done
    printf '%s 99999' "$(printf Ben | "$program" -encode -tokenizer run)" |
        "$program" -decode -tokenizer run >out 2>err || true
    printf 'Ben\n' | cmp - out
    grep -q 'id number [0-9]* is 99999, this tokenizer .* has ids 0 to ' err
    refused 2 '-tokenizer' -encode
    refused 1 'no file or folder' -decode -tokenizer nowhere
    if [ -e /dev/full ]; then
        status=0
        "$program" -encode -tokenizer run <stories.txt >/dev/full 2>err || status=$?
        [ $status = 1 ]
        holds err 'cannot write'
    fi
}

# What was asked for and could not be written is a failure.
full_output() {
    [ -e /dev/full ] || { echo 'no /dev/full'; exit 77; }
    local flags status
    for flags in -dry-run -help -version -print-config '-evaluate -load run' '-generate -load run -sample-tokens 3'; do
        status=0
        "$program" $flags >/dev/full 2>err || status=$?
        [ $status = 1 ] || say_and_fail "$flags: exit code $status"
        holds err 'error: cannot write to stdout'
    done
}
too_large() {
    local status=0
    "$program" -device cpu -dry-run -layers 999 -channels 8192 -heads 64 -attention naive >out 2>err || status=$?
    [ $status = 1 ]
    holds err 'error: not enough memory: the run needs '
    holds out '^  shape  *999 layers of 8192'
    holds out 'B  in all; free: '
}
# The number of threads that there are, not the one that was asked for.
fewer_threads() {
    OMP_THREAD_LIMIT=1 "$program" -device cpu -threads 2 -dry-run >out 2>err
    "$program" -device cpu -threads 2 -dry-run >two 2>err
    grep -q ' 2 threads, ' two || { echo 'this build has no OpenMP'; exit 77; }
    holds out ' 1 thread (OpenMP gives no more; asked for: 2), '
    # It computes the same then, but for the rounding of sums in another order: 4e-7 of a loss near 6 (2^-24), a thousand
    # times as much after three steps at the most. What a missing thread's share makes of it is of the order of 1.
    for limit in 1 2; do
        OMP_THREAD_LIMIT=$limit "$program" -data stories.txt $small -threads 2 -steps 3 -run "fewer-$limit" >out 2>err
        grep '"type":"eval"' "fewer-$limit/log.jsonl" | tail -n 1 | sed 's/.*"loss":\([^,]*\),.*/\1/' >"loss-$limit"
    done
    paste loss-1 loss-2 | awk '{ d = $1 - $2; bad = !($1 > 0) || d > 1e-3 || -d > 1e-3; if (bad) print } END { exit bad }'
}
too_short() {
    printf 'Anna' >short.txt
    ends_with 1 "$program" -evaluate -load run -heldout short.txt
    holds err 'there are [0-9]* tokens, and a window of the model needs [0-9]*; give more text by -heldout'
}

wrong_usage() {
    refused 2 'did you mean -steps' -stesp 5
    refused 2 'of several texts the folder' -data stories.txt more.txt
    refused 1 "no file or folder s\*.txt; check the path (several texts: give the folder" -data 's*.txt'
    refused 2 'there is no flag -colour; see -help' -colour 5
    refused 2 '12x' -steps 12x
    refused 2 '1e9' -steps 1e9
    refused 2 'nan' -lr nan
    refused 2 'needs a value' -steps
    refused 2 'unexpected' stories.txt
    refused 2 'text to evaluate on by -heldout' -evaluate -data stories.txt
    refused 2 'is for training, and -generate does not train' -generate -lr 3
    refused 2 'is for training, and -evaluate does not train' -evaluate -steps 10
    refused 2 '-layers is for training, and -tokenize does not train' -tokenize -data stories.txt -layers 6 -run never
    refused 2 '-lr is for training, and -tokenize does not train' -tokenize -data stories.txt -lr 1 -run never
    [ ! -e never ]
    refused 2 'give one of them' -generate -evaluate
    refused 2 'give one of them' -steps 5 -minutes 1
    # Without a GPU (or a build without the CUDA part), an answer in one line.
    status=0
    "$program" -device cuda -dry-run >out 2>err || status=$?
    [ $status = 0 ] || { [ "$(wc -l <err)" = 1 ] && grep -q 'error: .*-device cpu' err; }
    refused 2 '-heads' -channels 30 -heads 4
    refused 2 '-min-lr' -lr 1e-4 -min-lr 1e-3
    refused 2 '-micro' -micro 8 -batch 4
    refused 2 '-heldout' -data 'run/tokens/train-*.bin'
    refused 2 '-special' -special
    refused 2 'both given' $train -minutes 1
    refused 1 'no file or folder' -data nowhere.txt
    mkdir nothing
    (cd nothing && refused 1 'no run' -resume)
    : >empty.txt
    ends_with 1 "$program" -data empty.txt -steps 1 -run emptied
    [ "$(wc -l <err)" = 1 ]
    lacks out 'training a tokenizer'
    TRAIN_GPT_SIMD=mmx "$program" -version 2>&1 | grep -q 'TRAIN_GPT_SIMD=mmx'
}

# Each processor takes four threads, no more. What a run has from a larger machine is no mistake.
too_many_threads() {
    processors=$(getconf _NPROCESSORS_ONLN)
    [ "$processors" -lt 1000 ] || { echo "$processors processors: -threads has no value that is too large"; exit 77; }
    refused 2 "-threads $((4 * processors + 1)) is more .*; use $((4 * processors)) or fewer" \
        $train -threads $((4 * processors + 1)) -run never
    refused 2 '-threads 4096 is more' -generate -load run -threads 4096
    "$program" -dry-run $train -threads $((4 * processors)) >out
    # What the environment says wrongly is not taken; of what is no number the OpenMP library has words of its own.
    for threads in 4000 0 rubbish; do
        OMP_NUM_THREADS=$threads "$program" -print-config >out 2>err
        holds out '"threads": [1-9]'
        lacks out '"threads": 4000'
        [ $threads != 4000 ] || holds err 'note: OMP_NUM_THREADS is 4000, more than 4 for each processor'
    done
    cp -r run of-a-large-machine
    sed -i 's/"threads": 1,/"threads": 4000,/' of-a-large-machine/run.json
    "$program" -resume -run of-a-large-machine -steps 7 >out
    lacks of-a-large-machine/run.json '"threads": 4000'
}

# A start that fails leaves nothing that the corrected one trips over, and takes nothing that was there before.
failed_starts() {
    fails() { # WORDS ARGUMENT...
        local words=$1
        shift
        ends_with 1 "$program" -data stories.txt $small -steps 1 "$@"
        holds err "$words"
    }
    mkdir no-text mine
    : >empty.txt
    fails 'holds no story' -data empty.txt -run start
    fails 'holds no text' -data no-text -run start
    fails '-batch 5000.*lower -batch to [0-9]* or' -batch 5000 -micro 4 -run start
    printf 'Anna found a ball. %.0s' $(seq 40) >one.txt
    fails 'held-out side .*-heldout' -data one.txt -run start
    [ ! -e start ]
    fails 'sequence of 100000' -ctx 100000 -run mine
    [ -d mine ]
    [ -z "$(ls mine)" ]
    cp -r run kept
    fails 'holds no story' -data empty.txt -run kept -force
    diff -r -x lock run kept # the lock names its last process
    [ ! -e kept.old-1 ]
    "$program" -tokenize -data stories.txt -vocab 300 -run started >/dev/null
    fails 'sequence of 100000' -ctx 100000 -run started -resume
    "$program" -data stories.txt $small -steps 1 -run started -resume >/dev/null
}

# What the same command still needs is not moved aside by -force, nor removed as what an earlier start has left.
inputs_in_the_run_folder() {
    local how needs
    cp -r run within
    cp stories.txt within/mine.txt
    mkdir links
    ln -s ../within/mine.txt links/text.txt
    ln -s within linked
    ln -s ../stories.txt within/elsewhere.txt
    cp -r within within-before
    stays() { # FLAG ARGUMENT...
        refused 2 "-$1 needs [^ ]*, which is in the run folder [^ ]*within, and -force would move that aside; name another" \
            $small -steps 1 -force "${@:2}"
        diff -r within-before within
        [ ! -e within.old-1 ]
    }
    for how in '' -dry-run; do
        shards_of() { printf -- "-data %s/tokens/train-*.bin -heldout %s/tokens/heldout-*.bin" "$1" "$1"; }
        set -f
        for needs in "$(shards_of within)" "$(shards_of ./within/)" "$(shards_of linked)" "$(shards_of "$PWD/within")" \
            '-data within/mine.txt' '-data links/../within/mine.txt' '-data links/text.txt' '-data links' \
            '-data linked/mine.txt' '-data within/elsewhere.txt'; do
            stays data $needs -run within $how
        done
        stays heldout -data 'run/tokens/train-*.bin' -heldout 'within/tokens/heldout-*.bin' -run ./within $how
        stays heldout -data stories.txt -heldout links/text.txt -run "$PWD/within" $how
        stays load -data stories.txt -load within -run within $how
        stays load -data stories.txt -load linked/checkpoints/step-00000003 -run within $how
        set +f
    done
    refused 2 '-data needs within/mine.txt' -tokenize -data within/mine.txt -vocab 300 -run within -force
    (cd links && refused 2 '-data needs ../within/mine.txt' $small -steps 1 -data ../within/mine.txt -run ../within -force)
    diff -r within-before within
    # A path that only passes by is none of them, and another folder is as good as ever.
    "$program" $train -data within/../stories.txt -steps 1 -run within -force >out
    "$program" $train -data 'within.old-1/tokens/train-*.bin' -heldout 'within.old-1/tokens/heldout-*.bin' -steps 1 \
        -run within -force >out
    "$program" -evaluate -load within >out 2>err
    "$program" -resume -run within -steps 2 >out
    # Of the tokenizer the new run has a copy.
    "$program" -data stories.txt ${small/-vocab 300/} -tokenizer within -steps 1 -run within -force >out
    rm -r within.old-*
    "$program" -resume -run within -steps 2 >out
    "$program" -evaluate -load within >out 2>err
    # What lies where a start was given up is not removed, either.
    rm -r within/run.json within/log.jsonl within/checkpoints within/report.html within/tokens
    cp -r run/tokens within/tokens
    for how in '' -force -resume '-compare naive,flash'; do
        refused 2 '-data needs within/tokens/train-00000.bin.*would be removed; name another' $small -steps 1 $how \
            -data 'within/tokens/train-*.bin' -heldout 'within/tokens/heldout-*.bin' -run within
    done
    diff -r run/tokens within/tokens
}

# A run that goes on makes the tokens that it lacks anew: of the same text with the same tokenizer, or not at all. What
# was there before stays.
tokens_that_are_gone() {
    local was
    cp stories.txt text.txt
    "$program" $train -data text.txt -run gone >out
    cp -r gone whole
    for was in none merges.txt train-00000.bin data.json; do
        rm -rf gone
        cp -r whole gone
        case $was in
        none) rm -r gone/tokens ;;
        data.json) rm gone/tokens/data.json ;; # then the shards count as unfinished
        *) find gone/tokens -type f ! -name $was -delete ;;
        esac
        rm -rf gone-before
        cp -r gone gone-before
        { cat stories.txt && stories 100; } >text.txt
        refused_for() { # WORDS ARGUMENT...
            local words=$1
            shift
            ends_with 1 "$program" -resume -run gone "$@"
            diff -r -x lock -x '*.bin' gone-before gone # shards that are not finished are worth nothing
            holds err "$words"
        }
        refused_for 'made anew, of a text that has changed: put the old text back' -steps 7
        : >text.txt
        refused_for 'holds no story' -steps 7
        rm text.txt
        refused_for 'text.txt' -steps 7
        cp stories.txt text.txt
        "$program" -resume -run gone -steps 7 >out
        grep -q 'tokenizer  *[0-9]* tokens, from gone/checkpoints/' out
        diff -r whole/tokens gone/tokens
    done
    # What cannot be looked at is not gone.
    for was in link folder; do
        rm -rf gone
        cp -r whole gone
        rm gone/tokens/data.json
        case $was in
        link) ln -s nowhere gone/tokens/data.json ;;
        folder) mkdir gone/tokens/data.json ;;
        esac
        ends_with 1 "$program" -resume -run gone -steps 7
        case $was in
        link) holds err 'data.json: it is a link to something that is not there' ;;
        folder) holds err 'data.json is not a regular file: found a folder' ;;
        esac
        diff -r -x lock -x data.json whole/tokens gone/tokens
    done
    # What somebody else has put there stays, whatever becomes of the tokens.
    rm -rf gone
    cp -r whole gone
    rm gone/tokens/data.json
    mkdir gone/tokens.old
    echo mine | tee gone/tokens/notes.txt >gone/tokens.old/notes.txt
    rm text.txt
    ends_with 1 "$program" -resume -run gone -steps 7
    cp stories.txt text.txt
    "$program" -resume -run gone -steps 7 >out
    for was in tokens tokens.old; do
        [ "$(cat gone/$was/notes.txt)" = mine ]
    done
}

# A folder of the program's own that lost its run.json holds no run: its tokens are made anew.
tokens_without_a_run() {
    for how in '' -resume -force; do
        rm -rf bare
        "$program" -tokenize -data stories.txt -vocab 300 -run bare >/dev/null
        rm bare/run.json
        "$program" $train $how -run bare >out 2>err
        cmp "$(model_of run 6)" "$(model_of bare 6)"
    done
    mkdir -p foreign/tokens
    echo mine >foreign/tokens/train-00000.bin
    echo 17 >foreign/lock
    refused 1 'not empty and is no run' $train -run foreign
    [ "$(cat foreign/tokens/train-00000.bin)" = mine ]
}

# What becomes of an old run, or that there is none, is said; a dry run refuses what the call itself would.
ways_to_begin() {
    cp -r run begun-again
    "$program" $train -run begun-again -force >out 2>err
    grep -q '^the old run begun-again is now begun-again.old-1$' out
    [ ! -s err ]
    "$program" $train -run mistyped -resume >out 2>err
    grep -q '^train_gpt: note: there is no run in mistyped to go on with; a new one starts$' err
    mkdir mine-alone
    echo x >mine-alone/thesis
    cp -r begun-again before
    refused 1 'holds a run; go on' $train -run begun-again -dry-run
    refused 1 'not empty and is no run' $train -run mine-alone -dry-run
    refused 1 'not empty and is no run' $train -run mine-alone -dry-run -resume
    refused 1 'from outside of it' $train -run begun-again/. -force
    "$program" -resume -run begun-again -dry-run >out
    "$program" $train -run begun-again -force -dry-run >out
    diff -r before begun-again
    [ "$(ls mine-alone)" = thesis ]
}

# What the run's settings lack, or say otherwise than the checkpoint, is no other training.
settings_that_were_changed() {
    cp -r run edited
    sed -i 's/"ctx": 32/"ctx": 64/' edited/run.json
    refused_to_go_on() { # CODE WORDS
        ends_with "$1" "$program" -resume -run edited -steps 9
        holds err "$2"
        [ "$(newest edited)" = 6 ]
    }
    refused_to_go_on 1 'says a ctx of 32 .*the run.s settings say 64'
    sed -i '/"ctx"/d' edited/run.json
    refused_to_go_on 1 'edited/run.json lacks "ctx"'
    cp run/run.json edited
    sed -i 's/"dropout": 0.1[0-9]*/"dropout": 0.2/' edited/run.json
    refused_to_go_on 1 'a dropout of 0.1, the run.s settings say .* 0.2'
}

# A file that is empty is called so, with what to do.
empty_files() {
    local file
    for file in run.json tokens/data.json; do
        rm -rf emptied
        cp -r run emptied
        : >emptied/$file
        refused 1 "emptied/$file' is empty: expected .*; \(put a copy back, or start over with -force\|remove it,\)" \
            -resume -run emptied -steps 7
    done
    rm emptied/tokens/data.json # as it says
    "$program" -resume -run emptied -steps 7 >out
    : >emptied/run.json
    "$program" $train -steps 1 -run emptied -force >out
    cp -r run/checkpoints/step-00000006 emptied/copy
    rm emptied/copy/MANIFEST
    : >emptied/copy/config.json
    refused 1 'copy/config.json is empty: expected a JSON object; take another copy' -generate -load emptied/copy
}

# Moved away while it trains: nothing is made at the old place, and it goes on at the new one.
moved_while_it_trains() {
    "$program" -data stories.txt $small -steps 1000000 -eval-every 0 -checkpoint-every 1000000 -run leaving >out 2>err &
    process=$!
    until_step leaving 3
    mv leaving left
    stops TERM $process 1
    [ "$(grep -c 'was moved or removed while in use.*its checkpoints are where it was moved to' err)" = 1 ]
    lacks out 'saved'
    lacks out 'go on'
    [ ! -e leaving ]
    "$program" -resume -run left -dry-run >out
}

# Using a model while its run trains and keeps none but the newest.
used_while_it_trains() {
    "$program" -data stories.txt $small -steps 1000000 -eval-every 0 -checkpoint-every 1 -keep 1 -run live >out 2>err &
    process=$!
    until_step live 3
    status=0
    for _ in 1 2 3 4 5 6 7 8; do
        "$program" -generate -load live -sample-tokens 2 >story 2>told || { status=1; cat told; }
    done
    stops TERM $process 143
    return $status
}

# Without -load it is the newest run that has a model; what has none is told what it is.
newest_with_a_model() {
    mkdir home
    cd home
    "$program" -data ../stories.txt $small -steps 1 -eval-every 0 -samples 0 >out
    "$program" -tokenize -data ../stories.txt -vocab 300 -run runs/tokens >out
    touch -d '+1 hour' runs/tokens/run.json
    "$program" -generate -sample-tokens 3 >out 2>err
    "$program" -evaluate >out 2>err
    refused 1 'runs/tokens holds no model: .*has not saved one: train it by -resume' -generate -load runs/tokens
    refused 1 'runs holds no model: .*; name the folder of one of these' -generate -load runs
    # A checkpoint that was copied out of its run.
    cp -r runs/2*/checkpoints/step-00000001 alone
    ends_with 1 "$program" -evaluate -load alone
    holds err 'alone is in no run that would say what its held-out side is; name one with -heldout$'
    rm -r runs/2*
    refused 1 "no run under 'runs/' that holds a model" -generate
}

heldout_is_not_trained_on() {
    ln -sf stories.txt symlink.txt
    ln -f stories.txt hardlink.txt
    mkdir -p folder other-folder
    cp stories.txt folder/one.txt
    cp stories.txt folder/two.txt
    ln -f folder/two.txt other-folder/zwei.txt
    local both='both hold the file .*; name other text'
    for heldout in stories.txt ./stories.txt symlink.txt hardlink.txt; do
        refused 2 "$both" -data stories.txt -heldout $heldout $small -steps 1 -run never
    done
    for heldout in folder folder/two.txt other-folder; do
        refused 2 "$both" -data folder -heldout $heldout $small -steps 1 -run never
    done
    refused 2 "$both" -data folder/one.txt -heldout folder -vocab 300 -tokenize -run never
    refused 2 "$both" -data folder -heldout folder -compare naive,flash $small -steps 1 -run never
    refused 2 'both hold the file run/tokens/heldout-.*; name other shards' -data 'run/tokens/*.bin' \
        -heldout 'run/tokens/heldout-*.bin' $small -steps 1 -run never
    [ ! -e never ]
    "$program" -data folder/one.txt -heldout folder/two.txt $small -steps 1 -run apart >out # as good as another text
    "$program" -evaluate -load apart -heldout folder/one.txt >out 2>err
}

too_large_is_an_answer() {
    refused 1 'lower -micro' -batch 100000 -micro 100000 -ctx 1024 -channels 1024 -steps 1 -run never
    refused 2 '' -layers 1000000 -run never
    refused 2 '' -ctx 1000000000000 -run never
    [ ! -e never ]
}

asking() {
    "$program" -help >out 2>err
    [ ! -s err ]
    [ "$(wc -L <out)" -le 100 ]
    "$program" -version | grep -q '^train_gpt [0-9]'
    "$program" -dry-run $train -run never >out 2>err
    for table in data model 'a step' kernels memory disk; do grep -q "^$table\$" out; done
    [ ! -e never ]
    [ ! -s err ]
    "$program" -print-config -lr 0.5 >out
    grep -q '"lr": 0.5' out
    "$program" -print-config -resume -run run >out
    grep -q '"layers": 2' out
    command -v python3 >/dev/null || exit 0
    python3 -c 'import json, sys; json.load(open("out"))'
}

minutes_fix_the_steps() {
    "$program" -stories 50 $small -vocab 400 -minutes 0.03 -run timed >out 2>err
    steps=$(sed -n 's/.*"steps": \([0-9]*\),.*/\1/p' timed/run.json)
    [ "$steps" -ge 3 ]
    grep -q "^step $steps/$steps " out
    grep -q 'floor' out # built-in stories: it is known
    holds out '^step 1/?.*tokens/s$'
    grep -v "^step $steps/" out | head -n 3 >first
    lacks first ' 0 s left'
    # A fifth of the steps, at least ten more than were taken before it was known, at most the usual ones.
    warmup=$(sed -n 's/.*"warmup": \([0-9]*\),.*/\1/p' timed/run.json)
    [ "$warmup" -le 50 ]
    [ $((5 * warmup + 4)) -ge "$steps" ] || [ "$warmup" = 50 ]
    if ((warmup < 50)); then
        holds out "fit into 0.03 min, $((warmup < steps ? warmup : steps)) of them of warm-up$"
    fi
    # Cut, it rises as before but for the last ten steps, without a jump, and then the rate is -lr.
    "$program" -stories 50 $small -vocab 400 -batch 256 -micro 64 -minutes 0.03 -lr 4e-3 -min-lr 4e-3 -run cut >out 2>err
    steps=$(sed -n 's/.*"steps": \([0-9]*\),.*/\1/p' cut/run.json)
    warmup=$(sed -n 's/.*"warmup": \([0-9]*\),.*/\1/p' cut/run.json)
    grep '"type":"step"' cut/log.jsonl | sed 's/.*"step":\([0-9]*\),.*"lr":\([^,]*\),.*/\1 \2/' |
        awk -v w="$warmup" '{ bend = w - 10
            share = $1 <= bend ? $1 / 50 : $1 <= w ? bend / 50 + (1 - bend / 50) * ($1 - bend) / 10 : 1
            d = $2 - 4e-3 * share
            if (d > 1e-8 || -d > 1e-8) { print; bad = 1 } } END { exit bad }'
    [ "$warmup" -lt 50 ] || [ "$steps" -ge 200 ]
    # Evaluations that would take too long are of fewer tokens, and stay so.
    "$program" -stories 50 ${small% -eval-tokens*} -vocab 400 -minutes 0.01 -samples 0 -run brief >out 2>err
    tokens=$(sed -n 's/.*"eval_tokens": \([0-9]*\),.*/\1/p' brief/run.json)
    [ "$tokens" -ge 32 ]
    [ "$tokens" -lt 131072 ]
    [ "$(grep '"type":"eval"' brief/log.jsonl | grep -vc "\"tokens\":$tokens,")" = 0 ]
    # The same command goes on with the same schedule.
    "$program" -stories 50 $small -vocab 400 -minutes 0.03 -run timed -resume | grep -q 'nothing is left'
}

# Beside a loss stands the floor of the tokens that it is taken over, and of no others.
floor_of_what_is_evaluated() {
    rm -rf floor
    "$program" -stories 50 $small -vocab 400 -steps 1 -eval-tokens 512 -run floor >out 2>err
    logged=$(sed -n 's/.*"type":"eval".*"tokens":512,"floor":\([0-9.]*\)}.*/\1/p' floor/log.jsonl | sort -u)
    [ "$(echo "$logged" | wc -l)" = 1 ]
    holds out "over 512 tokens  floor $(printf %.4f "$logged")\$"
    for tokens in 512 64 20000; do
        "$program" -evaluate -load floor -eval-tokens "$tokens" >"of-$tokens" 2>err
        holds "of-$tokens" '  floor [0-9.]*$'
    done
    holds of-512 "  floor $(printf %.4f "$logged")\$"
    [ "$(sed 's/.*floor //' of-512 of-64 of-20000 | sort -u | wc -l)" = 3 ]
    # Tokens of an earlier version, which kept the floor of the whole side: none is told, and that is.
    sed -i 's/"builtin_seed": .*/"heldout_floor": 0.9/' floor/tokens/data.json
    "$program" -evaluate -load floor >out 2>err
    lacks out floor
    holds err 'note: no floor is known .* earlier version'
    "$program" -resume -run floor -steps 2 >out 2>err
    lacks out '  floor '
    holds floor/log.jsonl '"step":2,.*"floor":null'
    [ "$(grep -c 'note: no floor' err)" = 1 ]
}

not_finite_ends_a_run() {
    ends_with 1 "$program" -data stories.txt $small -lr 100 -warmup 0 -clip 0 -steps 1000 -eval-every 0 \
        -checkpoint-every 1 -run wild
    [ "$(grep -c 'not finite' err)" = 3 ]
    [ "$(grep -c '^train_gpt: error: ' err)" = 1 ]
    tail -n 1 wild/log.jsonl | grep -q '"reason":"failed: '
    # Nothing was saved after the first step that was not finite.
    bad=$(sed -n 's/.*note: step \([0-9]*\):.*/\1/p' err | head -n 1)
    [ "$(newest wild)" -lt "$bad" ]
}

for test in trains full_output too_large fewer_threads too_short log_is_json runs_twice_the_same \
    resume_is_bit_equal resume_of_a_finished_run \
    resume_passes_over_damage resume_keeps_what_is_fixed resume_may_start_a_run a_signal_saves run_folders \
    other_ways_to_the_same_model loading_a_model generating next_commands evaluating encoding wrong_usage \
    too_many_threads failed_starts inputs_in_the_run_folder tokens_that_are_gone tokens_without_a_run ways_to_begin \
    settings_that_were_changed empty_files moved_while_it_trains used_while_it_trains newest_with_a_model heldout_is_not_trained_on too_large_is_an_answer asking \
    minutes_fix_the_steps floor_of_what_is_evaluated not_finite_ends_a_run; do
    run_test $test
done
finish
