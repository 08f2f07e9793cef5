#!/usr/bin/env bash
# test_ranks.sh - several processes train one model: the same losses for 1, 2 and 3 ranks, the same bits in each run,
# resuming with another number of them, what is refused, and that nothing hangs: ranks are killed and stopped at
# every kind of moment. Takes the program's path; prints what failed, and at last
# "ranks_mpi: N passed, N failed, N skipped". Ranks are CPU processes of this machine; where it has several GPUs
# and the program can use them, they are on those.
# shellcheck disable=SC2086 # lists of flags are words
set -u
# shellcheck source-path=SCRIPTDIR source=lib.sh
. "$(dirname "$0")/lib.sh"
start_tests ranks_mpi "$@"
export ASAN_OPTIONS=detect_leaks=0${ASAN_OPTIONS:+:$ASAN_OPTIONS} # MPI's own leaks
# What Open MPI leaves of processes that were killed goes with everything else.
export OMPI_MCA_btl_vader_backing_directory=$tmp OMPI_MCA_orte_tmpdir_base=$tmp

# group TEST...: one after the other in a folder of their own, while other groups run. ONLY names some of all tests.
group() {
    local test status begun
    mkdir "$tmp/$1"
    cd "$tmp/$1" || exit 1
    for test in "$@"; do
        [[ -z ${ONLY-} || " $ONLY " == *" $test "* ]] || continue
        begun=$SECONDS
        (set -e; "$test") > output 2>&1
        status=$?
        mv output "$tmp/$test.$status.done"
        [[ -z ${VERBOSE-} ]] || echo "  $test: $((SECONDS - begun)) s"
    done
}
# What the groups have left.
count_results() {
    local file
    for file in "$tmp"/*.done; do
        [[ $file =~ /([^/]*)[.]([0-9]*)[.]done$ ]] && count_result "${BASH_REMATCH[1]}" "${BASH_REMATCH[2]}" "$file"
    done
}

command -v mpirun > /dev/null || skip_all 'no mpirun (dev/setup installs one)'
OMPI_COMM_WORLD_SIZE=2 "$program" -dry-run 2>&1 | grep -q 'has no MPI' && skip_all 'this build has no MPI'
launch=(mpirun)
open_mpi=no
if mpirun --version 2>&1 | grep -q 'Open MPI'; then
    open_mpi=yes
    launch+=(--oversubscribe --bind-to none)
    [[ $(id -u) != 0 ]] || launch+=(--allow-run-as-root)
fi

# One GPU a rank, or CPUs. What is rounded to bf16 differs by more from one way to split a step to another.
gpus=$(nvidia-smi -L 2> /dev/null | grep -c GPU)
device='-device cpu' close=1e-6 counts='1 2 3' most=3 timeout=2
if "$program" -device cuda -dry-run > /dev/null 2>&1 && ((gpus >= 2)); then
    device='-device cuda -deterministic' close=2e-2 most=$((gpus < 3 ? gpus : 3)) timeout=6 # NCCL starts slowly
    [[ $most == 3 ]] || counts='1 2'
fi

small="-stories 60 $device -threads 1 -layers 2 -heads 2 -channels 64 -ctx 64 -batch 6 -vocab 300 -sample-tokens 10 -seed 3"
ranks() { # N ARGUMENT...: the program in N processes, a minute at most
    local n=$1
    shift
    timeout -k 5 60 "${launch[@]}" -n "$n" "$program" "$@" < /dev/null > out 2> err
}
losses() { sed -n 's/^{"type":"step","step":\([0-9]*\),"loss":\([^,]*\),.*/\1 \2/p' "$1/log.jsonl"; }
evals() { sed -n 's/^{"type":"eval","step":\([0-9]*\),"loss":\([^,]*\),"bits_per_byte":\([^,]*\),.*/\1 \2 \3/p' "$1/log.jsonl"; }
# near A B STEPS: both runs have the same steps, once each, with nearly the same losses.
near() {
    paste -d ' ' <(losses "$1") <(losses "$2") | awk -v close_to="$close" -v steps="$3" '
        $1 != NR || $3 != NR || NF != 4 { print "line " NR ": " $0; bad = 1 }
        { d = $2 - $4; if (d < 0) d = -d; if (!(d <= close_to)) { print "step " NR ": " $2 " and " $4; bad = 1 } }
        END { exit bad || NR != steps }' || say_and_fail "$1 and $2 differ, or have not $3 steps"
}
same_evals() {
    paste -d ' ' <(evals "$1") <(evals "$2") | awk -v close_to="$close" '
        { d = $2 - $5; e = $3 - $6; if (NF != 6 || d > close_to || -d > close_to || e > close_to || -e > close_to) { print; bad = 1 } }
        END { exit bad || NR == 0 }' || say_and_fail "held-out losses of $1 and $2 differ"
}

# ---- the same result ----
same_losses() {
    local n
    for n in $counts; do
        ranks "$n" $small -dropout 0.1 -lr 1e-3 -steps 50 -eval-every 10 -eval-tokens 640 -run "same-$n"
    done
    for n in $counts; do
        near same-1 "same-$n" 50
        same_evals same-1 "same-$n"
    done
    grep -q '^ *ranks  *'"$most"' on 1 host' out
    grep -q "^go on    mpirun -n $most " out
    # What is in the log is what one process alone, without a launcher, has.
    "$program" $small -dropout 0.1 -lr 1e-3 -steps 50 -eval-every 10 -eval-tokens 640 -run alone > out 2> err
    same_state "$(step_of alone 50)" "$(step_of same-1 50)"
}
same_bits() {
    ranks "$most" $small -dropout 0.1 -lr 1e-3 -steps 50 -eval-every 10 -eval-tokens 640 -run again
    same_state "$(step_of again 50)" "$(step_of "same-$most" 50)"
    [[ $(losses again) == "$(losses "same-$most")" && $(evals again) == "$(evals "same-$most")" ]]
}
# Seven buckets, more than are under way at once; micro-batches of which the last alone is averaged.
many_buckets() {
    local n
    for n in $counts; do
        ranks "$n" $small -layers 2 -channels 512 -ctx 16 -micro 1 -steps 3 -eval-every 0 -eval-tokens 64 \
            -samples 0 -clip 0.5 -checkpoint-every 0 -run "buckets-$n"
        near buckets-1 "buckets-$n" 3
    done
}
resume_with_others() {
    local n m
    for n in $counts; do
        ranks "$n" $small -steps 6 -eval-every 0 -eval-tokens 64 -samples 0 -checkpoint-every 3 -keep 9 -run "from-$n"
    done
    for n in $counts; do
        for m in $counts; do
            [[ $n != "$m" || $n == "$most" ]] || continue
            cp -r "from-$n" "to-$n-$m"
            rm -r "to-$n-$m/checkpoints/step-00000006"
            ranks "$m" -resume -run "to-$n-$m" -device "${device#-device }"
            near from-1 "to-$n-$m" 6
            # With as many as before, nothing has happened at all.
            [[ $n != "$m" ]] || same_state "$(step_of "from-$n" 6)" "$(step_of "to-$n-$m" 6)"
        done
    done
}
minutes() {
    ranks 2 $small -minutes 0.03 -run minutes
    grep -q '"type":"end".*"reason":"done"' minutes/log.jsonl
}

# ---- what is refused, by all with one message ----
all_refuse() { # CODE WORDS N ARGUMENT...
    local code=$1 words=$2 status=0
    shift 2
    ranks "$@" || status=$?
    [[ $status == "$code" ]] || say_and_fail "$*: exit code $status, expected $code: $(cat err)"
    [[ $(grep -c '^train_gpt: error:' err) == 1 ]] || say_and_fail "$*: not one message: $(cat err)"
    grep -q "^train_gpt: error: .*$words" err || say_and_fail "$*: no '$words' in: $(cat err)"
}
refusals() {
    local mode
    all_refuse 2 'use -batch 6 or 8, or 1 rank$' 2 $small -batch 7 -run no
    for mode in -generate '-compare naive,flash' -encode; do
        all_refuse 2 'runs in one process' 2 $mode
    done
    all_refuse 2 'no flag -layerz; did you mean' 2 -layerz 3
    all_refuse 2 'rank 1 on .*layers is 3 here and 2 on rank 0' 1 $small -run no : -n 1 "$program" $small -layers 3 -run no
    for mode in -generate -help -version -print-config; do
        all_refuse 2 "the mode: found training, rank 0 has ${mode#-}; " 1 $mode : -n 1 "$program" $small -run no
    done
    all_refuse 1 'nowhere.txt' 2 $small -data nowhere.txt -run no
    [[ ! -e no ]] || say_and_fail 'a refused run left a folder'
    TRAIN_GPT_SIMD=mmx ranks 2 -version
    [[ $(wc -l < out) == 1 ]]
    [[ $(grep -c 'note: TRAIN_GPT_SIMD=mmx' err) == 1 ]] # rank 0 says it for all
    # A launcher that this MPI knows nothing of.
    if OMPI_COMM_WORLD_SIZE='' SLURM_STEP_NUM_TASKS=3 "$program" $small -run no > out 2> err; then
        say_and_fail 'three tasks that do not know each other were taken for one'
    fi
    grep -q 'started 3 processes .*MPI sees 1' err
}
# Two hosts whose folders are not the same: the tokens of each, or none.
other_data() {
    [[ $open_mpi == yes ]] || { echo 'needs -wdir'; exit 77; }
    local text="-data t/train-*.bin -heldout t/heldout-*.bin -steps 2" make="-stories 60 -vocab 300 -threads 1 -tokenize"
    local status=0
    mkdir -p a b c
    "$program" $make -seed 3 -run made > out 2>&1
    cp -r made/tokens a/t
    cp -r made/tokens b/t
    "$program" $make -seed 4 -tokenizer made -run other > out 2>&1
    cp other/tokens/train-00000.bin b/t/
    set -f
    timeout -k 5 60 "${launch[@]}" -n 1 -wdir "$PWD/a" "$program" $small $text -run "$PWD/r" : \
        -n 1 -wdir "$PWD/b" "$program" $small $text -run "$PWD/r" < /dev/null > out 2> err || status=$?
    [[ $status == 1 ]]
    holds err '^train_gpt: error: rank 1 on .*the tokens: found training'
    status=0
    timeout -k 5 60 "${launch[@]}" -n 1 -wdir "$PWD/a" "$program" $small -steps 2 -run here : \
        -n 1 -wdir "$PWD/c" "$program" $small -steps 2 -run here < /dev/null > out 2> err || status=$?
    [[ $status == 1 ]]
    holds err '^train_gpt: error: rank 1 on .*file system that all hosts share'
    [[ ! -e a/here && ! -e c/here ]]
}
one_gpu_for_two() {
    ((gpus > 0)) || { echo 'no GPU here'; exit 77; }
    "$program" -device cuda -dry-run > out 2>&1 || { echo 'this build or driver cannot use the GPU'; exit 77; }
    local too_many=$((gpus + 1))
    all_refuse 1 'fewer GPUs than ranks' $too_many $small -batch $too_many -device cuda -run no
}
# What several ranks do, done by one for nothing: the same bits.
averaging_alone() {
    local on=${device%% -det*}
    ((gpus > 0)) && "$program" -device cuda -dry-run > out 2>&1 && on='-device cuda'
    local run
    for run in without with; do
        [[ $run == without ]] || export TRAIN_GPT_AVERAGE_ALONE=1
        "$program" $small $on -deterministic -steps 5 -samples 0 -eval-tokens 64 -run "$run" > out 2> err
    done
    same_state "$(step_of with 5)" "$(step_of without 5)"
}

# ---- nothing hangs ----
# A run that would take for ever; each rank leaves its process id in pid.RANK.
start() { # N ARGUMENT...
    local n=$1
    shift
    rm -rf pid.* run
    # shellcheck disable=SC2016 # for the shell that is started
    "${launch[@]}" -n "$n" bash -c 'echo $$ > pid.${OMPI_COMM_WORLD_RANK:-$PMI_RANK}; exec "$@"' start \
        "$program" $small -steps 1000000 -eval-every 0 -eval-tokens 64 -samples 0 -checkpoint-every 20 -run run "$@" \
        < /dev/null > out 2> err &
    mpirun=$!
    for _ in $(seq 500); do
        [[ $(cat pid.* 2> /dev/null | wc -l) == "$n" ]] && return
        sleep 0.02
    done
    say_and_fail 'the ranks did not start'
}
until_seen() { # COMMAND...: succeeds within a minute
    for _ in $(seq 3000); do
        "$@" > /dev/null 2>&1 && return
        kill -0 "$mpirun" 2> /dev/null || break
        sleep 0.02
    done
    kill -KILL "$mpirun" 2> /dev/null
    say_and_fail "never seen: $*: $(tail -n 5 out err)"
}
step_done() { grep -qs "\"type\":\"step\",\"step\":$1," run/log.jsonl; }
saved_one() { compgen -G 'run/checkpoints/step-00000*[0-9]/MANIFEST'; }
alive() { [[ -e /proc/$1/stat && $(sed 's/.*) //' "/proc/$1/stat") != Z* ]]; }
# ends CODES SECONDS WORDS: mpirun ends with one of the codes, in time, having said so; no rank is left, and the
# newest checkpoint is good.
ends() {
    local status=0 begun=$SECONDS pid
    (sleep "$2" && kill -KILL "$mpirun") 2> /dev/null &
    local killer=$!
    wait "$mpirun" 2> /dev/null || status=$?
    kill "$killer" 2> /dev/null || true
    [[ " $1 " == *" $status "* ]] || say_and_fail "exit code $status after $((SECONDS - begun)) s, expected $1: $(cat err)"
    [[ -z $3 ]] || grep -qi -e "$3" err || say_and_fail "no '$3' in: $(cat err)"
    # shellcheck disable=SC2013 # numbers
    for pid in $(cat pid.*); do
        for _ in $(seq 250); do alive "$pid" || break; sleep 0.02; done
        ! alive "$pid" || say_and_fail "process $pid is left: $(ps -o pid,stat,args -p "$pid")"
    done
    saved_one > /dev/null || return 0
    if ! "$program" -generate -load run -sample-tokens 3 > out 2> err.load || grep -q 'passed over' err.load; then
        say_and_fail "the newest checkpoint is not good: $(cat err.load)"
    fi
}
killed() { # RANK
    kill -KILL "$(cat "pid.$1")"
    if [[ $open_mpi == yes ]]; then ends '137' 15 "rank $1 .*\(killed\|signal 9\)"; else ends '9 137' 15 ''; fi
}
killed_in_step() { start "$most"; until_seen step_done 25; killed 1; start 2; until_seen step_done 25; killed 0; }
killed_at_start() { start "$most" -stories 200000; sleep 0.5; killed 1; start 2 -stories 200000; killed 0; }
killed_in_evaluation() {
    start "$most" -eval-every 21 -eval-tokens 100000000
    until_seen step_done 21
    killed "$((most - 1))"
}
killed_in_sampling() {
    start 2 -sample-every 21 -samples 100000 -sample-tokens 100000 -checkpoint-every 7
    until_seen step_done 21
    sleep 0.2
    killed 1
}
killed_in_save() {
    start 2 -checkpoint-every 1 -channels 256
    until_seen saved_one
    until_seen compgen -G 'run/checkpoints/*tmp*'
    killed 0
}
stopped() { # RANK SECONDS
    kill -STOP "$(cat "pid.$1")"
    ends '1' "$2" "^train_gpt: error: rank $1 on .* silent\|^train_gpt: error: .* shows no life"
}
stopped_in_step() {
    start "$most" -timeout $timeout
    until_seen step_done 25
    stopped 1 $((15 * timeout / 2))
    start 2 -timeout $timeout
    until_seen step_done 25
    stopped 0 $((15 * timeout / 2))
}
stopped_at_start() { start 2 -timeout 1 -stories 400000; sleep 0.7; stopped 0 30; }

signalled() { # CODE
    ends "$1" 15 ''
    [[ $(grep -c '"type":"end"' run/log.jsonl) == 1 ]] || say_and_fail 'not one end in the log'
    local last
    last=$(losses run | tail -n 1 | cut -d ' ' -f 1)
    [[ -e $(step_of run "$last")/MANIFEST ]] || say_and_fail "step $last is not saved"
}
signals() {
    start "$most"; until_seen step_done 5; kill -TERM "$(cat pid.1)"; signalled 143
    start "$most"; until_seen step_done 5; kill -USR1 "$(cat pid.0)"; signalled 138
    [[ $open_mpi == yes ]] || return 0
    start 2; until_seen step_done 5; kill -USR1 "$mpirun"; signalled 138
    # While rank 0 writes stories that would take for ever, and while all evaluate.
    start 2 -sample-every 5 -samples 100000 -sample-tokens 100000
    until_seen step_done 5; sleep 0.2; kill -TERM "$(cat pid.1)"; signalled 143
    start 2 -eval-every 5 -eval-tokens 100000000
    until_seen step_done 5; sleep 0.2; kill -TERM "$(cat pid.1)"; signalled 143
    [[ $(losses run | wc -l) == 5 ]]
}
# A failure that only one rank knows of ends all of them.
damaged_shard() {
    ranks 2 $small -steps 40 -eval-every 0 -eval-tokens 64 -samples 0 -checkpoint-every 20 -run damaged
    rm -r damaged/checkpoints/step-00000040
    printf '\377' | dd of=damaged/tokens/train-00000.bin bs=1 seek=3001 conv=notrunc 2> /dev/null
    local status=0
    ranks 2 -resume -run damaged || status=$?
    [[ $status != 0 && $status != 124 ]]
    holds err '^train_gpt: error: .*train-00000.bin'
}

# Those of one line build on each other's runs. They mostly wait: for mpirun to start, and to kill.
group same_losses same_bits many_buckets resume_with_others minutes averaging_alone damaged_shard &
group refusals other_data one_gpu_for_two stopped_at_start stopped_in_step &
group killed_at_start killed_in_step killed_in_evaluation killed_in_sampling killed_in_save signals &
wait
count_results
finish
