#!/usr/bin/env bash
# test_hostile.sh - hostile surroundings: each flag with absurd values, sizes whose products overflow, and run
# folders that are in use, cannot be written, lie on a read-only or a full disk, or are no run. The answer is one
# line on stderr and exit code 1 or 2, never a crash, and nothing is changed. Takes the program's path; at last
# "hostile: N passed, N failed, N skipped".
# shellcheck disable=SC2086 # lists of flags are words
set -u
# shellcheck source-path=SCRIPTDIR source=lib.sh
. "$(dirname "$0")/lib.sh"
start_tests hostile "$@"

in_folder() { (cd "$1" && shift && "$@"); } # FOLDER COMMAND...
done_with() { # ARGUMENT...
    local status=0
    ${limit[@]+"${limit[@]}"} "$program" "$@" < /dev/null > out 2> err || status=$?
    ((status == 0)) || { echo "$*: exit code $status: $(cat err)"; return 1; }
}

stories 20 > stories.txt
text="-data stories.txt -vocab 257 -threads 1"
small="$text -device cpu -layers 1 -heads 2 -channels 16 -ctx 16 -batch 2 -eval-every 0
    -eval-tokens 32 -samples 1 -sample-tokens 4"
done_with $small -steps 2 -run reference || { cat err; exit 1; }
"$program" -help | cut -c 1-24 | sed -n 's/^  -\([a-z][a-z0-9-]*\) *\([A-Z|a-z0-9,]*\).*/\1 \2/p' > flags

# ---- each flag ----
long=$(head -c 100000 /dev/zero | tr '\0' 9)
not_utf8=$(printf 'a\377\376z')
controls=$(printf 'a\n\033[31mz')
whole=('' -1 -9223372036854775809 9223372036854775807 99999999999999999999 1e9 nan inf 0x10 1.5 ' 1' '1 ' 1x '+' '-'
    "$long" "-$long" "$not_utf8" "$controls" '1,000' true)
real=('' -1 -1e-3 -inf inf nan NAN 1e999 1e300 0x1p3 '1,5' ' 1' 1x . e '+' '-' "$long" "-$long" "$not_utf8" "$controls"
    true)
choice=('' x 0 -1 "$long" "$not_utf8" "$controls")
path=('' "$long" "$not_utf8")
# 0 has a meaning: none, never, only at the end.
zero=' dropout lr min-lr warmup weight-decay beta1 beta2 clip seed eval-every sample-every samples temperature top-k
    top-p checkpoint-every '
tried=0
each_flag() {
    local name kind value values words
    while read -r name kind; do
        case $name:$kind in
        prompt:*) values=("$not_utf8") ;;
        *:N) values=("${whole[@]}") ;;
        *:X) values=("${real[@]}") ;;
        *:PATH | *:RUN | *:DIR | *:A,B) values=("${path[@]}") ;;
        *:*'|'* | *:) values=("${choice[@]}") ;;
        *)
            echo "-$name $kind: a kind of value that this test does not know"
            return 1
            ;;
        esac
        for value in "${values[@]}"; do
            words="^train_gpt: error: -$name: found \""
            [[ $name != attention ]] || words="$words\|no attention backend named" # a kernel can be named, too
            refused 2 "$words" -dry-run "-$name=$value"
            echo tried >> flags.tried
        done
        [[ $kind == [NX] ]] || continue
        if [[ $zero =~ [[:space:]]${name}[[:space:]] ]]; then
            done_with -dry-run "-$name" 0
        else
            refused 2 "^train_gpt: error: -$name: found \"0\", expected a" -dry-run "-$name" 0
        fi
        # As a word of its own, and without any.
        refused 2 "^train_gpt: error: -$name: found \"nan\"" -dry-run "-$name" nan
        refused 2 "^train_gpt: error: -$name needs a value" -dry-run "-$name"
        echo tried >> flags.tried
    done < flags
    (($(wc -l < flags) >= 50)) || { echo "only $(wc -l < flags) flags in -help"; return 1; }
    (($(wc -l < flags.tried) >= 500)) || { echo "only $(wc -l < flags.tried) values"; return 1; }
}
run_as 'each flag with absurd values' each_flag
tried=$(wc -l < flags.tried)
passed=$((passed + tried - 1))

paths_and_words() {
    local name
    for name in data heldout tokenizer load; do
        refused 1 'nowhere' $small -steps 1 -run never "-$name" nowhere
        refused 1 'no?where' $small -steps 1 -run never "-$name" "$(printf 'no\nwhere')"
        refused 1 '99999' $small -steps 1 -run never "-$name" "${long::4000}" # longer than a name can be
    done
    refused 1 '99999' $small -steps 1 -run "${long::4000}"
    refused 1 'nowhere' -generate -load nowhere
    refused 1 'nowhere' -evaluate -load nowhere
    ends_with 1 "$program" -evaluate -load reference -heldout nowhere
    [[ ! -s out ]]
    tail -n 1 err | grep -q '^train_gpt: error: -heldout: there is no file or folder nowhere;'
    refused 2 'nowhere' $small -steps 1 -compare naive,nowhere -run never
    refused 2 '-compare' $small -steps 1 -compare ,,, -run never
    refused 2 '-compare' $small -steps 1 -compare naive,naive -run never
    done_with -generate -load reference -sample-tokens 3 -prompt ''
    done_with -generate -load reference -sample-tokens 3 -prompt "$long"
    done_with -generate -load reference -sample-tokens 3 -prompt "$controls"
    refused 2 'flags begin with -' "$long"
    refused 2 'there is no flag' "-$long"
    refused 2 'there is no flag' "-$not_utf8"
    refused 2 'there is no flag' "-$controls"
    refused 2 '' -
    refused 2 '' --
    refused 2 '' ''
    refused 2 '' =
    refused 2 '' -=
    refused 2 '' "--x=$long"
    [[ ! -e never ]]
}
run_as 'paths and words' paths_and_words

# ---- sizes ----
answered() { # CODES ARGUMENT...: one of them, in one line if it is no 0
    local codes=$1 status=0
    shift
    ${limit[@]+"${limit[@]}"} "$program" "$@" < /dev/null > out 2> err || status=$?
    [[ " $codes " == *" $status "* ]] || { echo "$*: exit code $status: $(cat err)"; return 1; }
    # The tables of what does not fit may note that the disk is too small for it, too.
    sed -i '/^train_gpt: note: the disk has room for /d' err
    ((status == 0)) || [[ $(wc -l < err) == 1 && $(cat err) == 'train_gpt: error: '* ]] ||
        { echo "$*: $(cat err)"; return 1; }
}
huge_sizes() {
    local sizes most=1099511627776 count=0
    for sizes in '-layers 1000000' "-layers $most" '-channels 1000000000' "-channels $most" "-heads $most" \
        "-heads $most -channels $most" '-batch 1000000000' '-ctx 1000000000' "-ctx $most" \
        '-ctx 1000000000 -batch 1000000000' "-ctx $most -batch 1000000000 -micro 1000000000" \
        '-micro 1000000000 -batch 1000000000' "-layers $most -channels $most -ctx $most -batch 1000000000" \
        '-layers 1024 -channels 2147483647 -heads 2147483647 -position learned' \
        '-layers 1024 -heads 16777216 -channels 2147483648' '-channels 2147483520 -heads 16777215 -ctx 2147483647' \
        '-ctx 2147483647 -batch 1000000000 -samples 1000000 -sample-tokens 1000000000'; do
        for more in '-attention flash' '-attention naive -position learned'; do
            # Some of them are a matter of memory, or of the data, some of use; a plan alone may be possible.
            answered '1 2' $small -steps 1 -run never $sizes $more
            answered '0 1 2' -dry-run -run never $sizes $more
            count=$((count + 2))
        done
    done
    [[ ! -e never ]]
    # What is large and harmless.
    done_with $small -dry-run -steps $most -warmup $most -eval-every $most -keep 1000000 -checkpoint-every $most
    done_with $small -dry-run -eval-tokens 9007199254740992 -sample-tokens 1000000000 -seed 9007199254740992
    done_with -dry-run -stories 1000000000 -minutes 10000000
    echo $count > sizes.tried
}
run_as 'sizes whose products overflow' huge_sizes
passed=$((passed + $(cat sizes.tried 2> /dev/null || echo 1) - 1))

# ---- a folder that is in use ----
in_use() {
    local process mode status=0 step
    rm -rf busy
    "$program" $small -steps 1000000000 -run busy > busy.out 2>&1 &
    process=$!
    until_step busy 3
    for mode in '-resume -run busy' "$small -steps 1 -run busy" "$small -steps 1 -run busy -force" \
        "$text -tokenize -run busy" "$small -steps 1 -run busy/" "-resume -run ./busy"; do
        refused 1 'busy.*in use by another process, number [0-9]\|busy.* holds a run' $mode || status=1
    done
    # Nothing of it is read before it is locked.
    mv busy/run.json settings
    echo '{' > busy/run.json
    refused 1 'busy.*in use by another process, number [0-9]' -resume -run busy || status=1
    mv settings busy/run.json
    cp busy/log.jsonl before
    kill -TERM $process
    wait $process || [[ $? == 143 ]] || status=1
    # Nobody took anything from it: each step has its row, and it goes on.
    step=$(newest busy)
    [[ $(grep -c '"type":"step"' busy/log.jsonl) == "$step" && ! -e busy.old-1 ]] || status=1
    head -c "$(wc -c < before)" busy/log.jsonl | cmp - before || status=1
    return $status
}
run_as 'a run folder that is in use' in_use

# ---- what is no run ----
not_a_run() {
    mkdir -p other empty
    echo mine > other/mine
    ln -sf nothing-there dangling
    ln -sfn reference linked
    refused 1 'stories.txt.* is a file' $small -steps 1 -run stories.txt
    refused 1 'stories.txt.* is a file' $small -steps 1 -run stories.txt -force
    refused 1 'stories.txt.* is a file' $small -steps 1 -run stories.txt -resume
    refused 1 'stories.txt: there is a file of that name' $small -steps 1 -run stories.txt/under-a-file
    refused 1 'dangling' $small -steps 1 -run dangling
    for how in '' -force -resume; do refused 1 'not empty and is no run' $small -steps 1 -run other $how; done
    refused 1 'not empty and is no run' $small -steps 1 -run / $how
    refused 1 'not empty and is no run' $small -steps 1 -run . $how
    for how in stories.txt other empty dangling /dev/null; do
        refused 1 "$how" -generate -load $how
        refused 1 "$how" -evaluate -load $how
        refused 1 "$how" $small -load $how -steps 1 -run never
    done
    [[ $(ls other) == mine && $(cat other/mine) == mine && -z $(ls empty) && ! -e never ]]
    (
        cd empty
        refused 1 "no run under 'runs/'" -resume
        refused 1 "no run under 'runs/'" -generate
    )
    rm empty/*
    done_with $small -steps 1 -run empty # which an empty folder may become
    done_with -generate -load linked
}
run_as 'folders that are no run' not_a_run

# Paths of about as many bytes as a path may have, and as many as an error takes.
long_paths() {
    local folder path=. length
    folder=$(printf 'a%.0s' $(seq 199))
    while ((${#path} < 3990)); do path+=/$folder; done
    for length in 4030 4050; do
        printf -v folder '%*s' $((length - ${#path} - 1)) ''
        refused 1 "has $length bytes, .*; name a shorter one with -run" $small -steps 1 -run "$path/${folder// /b}"
    done
    [[ ! -e ${path:0:200} ]]
    path=${path:0:1002}
    refused 1 'there is no file or folder .*; check the path' $small -steps 1 -run never -data "$path"
    mkdir -p "$path"
    echo mine > "$path/mine"
    refused 1 'is not empty and is no run .*; name a new or an empty folder with -run' $small -steps 1 -run "$path"
    rm -r "${path:0:201}"
}
run_as 'long paths' long_paths

# Each thing in a run, replaced by what it is not. Nothing crashes, and what cannot be used is named.
damaged_run() {
    local entry instead how status
    for entry in run.json log.jsonl report.html lock tokens tokens/merges.txt tokens/data.json \
        tokens/train-00000.bin tokens/heldout-00000.bin checkpoints checkpoints/step-00000002 \
        checkpoints/step-00000002/{MANIFEST,state.json,config.json,model.safetensors,optimizer.safetensors}; do
        for instead in nothing empty folder dangling pipe random huge; do
            rm -rf damaged
            cp -r reference damaged
            rm -r damaged/$entry
            case $instead in
            empty) : > damaged/$entry ;;
            folder) mkdir damaged/$entry ;;
            dangling) ln -s nothing-there damaged/$entry ;;
            pipe) mkfifo damaged/$entry ;;
            random) head -c 3000 "$program" > damaged/$entry ;;
            huge) truncate -s 1T damaged/$entry 2> /dev/null || continue ;;
            esac
            for how in '-resume -run damaged -steps 3' '-evaluate -load damaged'; do
                status=0
                ${limit[@]+"${limit[@]}"} "$program" $how > out 2> err < /dev/null || status=$?
                if ((status > 2)) || { ((status > 0)) && [[ $(grep -c '^train_gpt: error: ' err) != 1 ]]; }; then
                    echo "$entry is $instead, $how: exit code $status: $(cat err)"
                    return 1
                fi
                echo "$instead $status" >> damaged.tried
            done
        done
    done
    (($(wc -l < damaged.tried) > 200))
    grep -q 'nothing 0' damaged.tried
    grep -q 'folder 1' damaged.tried
}
run_as 'a run in which something is replaced' damaged_run
passed=$((passed + $(wc -l < damaged.tried) - 1))

# ---- checkpoints that are there and cannot be read, or were and are gone ----
# The run does not begin anew, nor go on from an older one: it may be good, and would be overwritten.
refused_untouched() { # WORDS: a resume of `broken`
    rm -rf before
    cp -r broken before
    refused 1 "$1" -resume -run broken -steps 3
    refused 1 "$1" -resume -run broken -steps 3 -dry-run
    diff -r --no-dereference -x lock before broken
}
broken_run() {
    rm -rf broken away
    cp -r reference broken
}
not_to_be_read() {
    local file
    broken_run
    mv broken/checkpoints away
    ln -s ../nowhere broken/checkpoints # on a disk that is not mounted
    refused_untouched 'checkpoints: it is a link to something that is not there; put that back or mount it'
    refused 1 'checkpoints: it is a link to something that is not there' -generate -load broken
    rm broken/checkpoints
    ln -s checkpoints broken/checkpoints
    refused_untouched 'broken/checkpoints: '
    rm broken/checkpoints
    : > broken/checkpoints
    refused_untouched 'broken/checkpoints: Not a directory'
    rm broken/checkpoints
    ln -s ../away broken/checkpoints
    done_with -resume -run broken -steps 3
    [[ -d away/step-00000003 ]]

    for file in MANIFEST state.json config.json model.safetensors optimizer.safetensors; do
        broken_run
        mv broken/checkpoints/step-00000002/$file away
        ln -s nowhere broken/checkpoints/step-00000002/$file
        refused_untouched "step-00000002/$file: it is a .*link.*, or move that checkpoint away to go on without it"
    done
    # Who only reads takes another one, and says so.
    broken_run
    mv broken/checkpoints/step-00000001/MANIFEST away
    ln -s nowhere broken/checkpoints/step-00000001/MANIFEST
    done_with -evaluate -load broken
    holds err 'note: passed over .*step-00000001/MANIFEST: it is a link to something that is not there'
    broken_run
    mv broken/checkpoints/step-00000002 away
    ln -s ../nowhere broken/checkpoints/step-00000002
    refused_untouched 'step-00000002: it is a link to something that is not there'
    # What the line says to do.
    rm broken/checkpoints/step-00000002
    done_with -resume -run broken
    holds out 'going on after step 1 '
}
run_as 'checkpoints that cannot be read' not_to_be_read
moved_away() {
    local gone='tells of 2 steps and of a checkpoint, but there is none in broken/checkpoints; put them back .* -force'
    broken_run
    mv broken/checkpoints away
    refused_untouched "$gone"
    mkdir broken/checkpoints # where a disk would be mounted
    refused_untouched "$gone"
    rmdir broken/checkpoints
    # Killed after it was gone on with.
    sed -i '/"type":"end"/d' broken/log.jsonl
    cp broken/log.jsonl log
    sed -n '/"type":"start"/p' log >> broken/log.jsonl
    refused_untouched "$gone"
    # A last line that was cut by the kill, or by a power cut filled with zeros.
    printf '{"type":"st' >> broken/log.jsonl
    refused_untouched "$gone"
    head -c 4096 /dev/zero >> broken/log.jsonl
    echo >> broken/log.jsonl
    refused_untouched "$gone"
    # The log itself, on that disk.
    mv broken/log.jsonl log
    ln -s nowhere broken/log.jsonl
    refused_untouched 'log.jsonl: it is a link to something that is not there'
    rm broken/log.jsonl
    mv log broken/log.jsonl
    cp -r away broken/checkpoints
    sed -i '$d' broken/log.jsonl # the zeros
    done_with -resume -run broken -steps 3
    # Stopped before its first checkpoint: it begins anew.
    broken_run
    rm -r broken/checkpoints
    sed -i '/"type":"end"/d; /"step":2/d' broken/log.jsonl
    done_with -resume -run broken
    [[ $(grep -c '"type":"start"' broken/log.jsonl) == 1 && $(grep -c '"type":"step"' broken/log.jsonl) == 2 ]]
    # Or before anything was logged.
    broken_run
    rm -r broken/checkpoints broken/log.jsonl
    done_with -resume -run broken
    # Nothing was moved where every save failed, as the end says, or could not be said; and where not even the folder
    # could be made, since the run was moved while it trained.
    for end in 's/"reason":"done"/"reason":"failed: no space left"/' '/"type":"end"/d'; do
        broken_run
        rm -r broken/checkpoints
        mkdir broken/checkpoints
        sed -i "$end" broken/log.jsonl
        done_with -resume -run broken
        broken_run
        rm -r broken/checkpoints
        sed -i "$end" broken/log.jsonl
        done_with -resume -run broken
    done
}
run_as 'checkpoints that were moved away' moved_away

# ---- folders that cannot be written ----
# As a user who may not: root may everything.
as_nobody() {
    if (($(id -u) != 0)); then "$@"
    elif command -v setpriv > /dev/null; then setpriv --reuid=65534 --regid=65534 --clear-groups "$@"
    else return 77
    fi
}
not_writable() {
    local status=0 copy=$tmp/program
    as_nobody true || { echo 'no setpriv, by which root could run it as somebody else'; exit 77; }
    cp "$program" program
    chmod 755 "$tmp" program
    as_nobody "$copy" -version > out 2> err || { echo "the program cannot be run as nobody: $(cat err)"; exit 77; }
    rm -rf closed open
    mkdir closed open
    chmod 555 closed
    chmod 777 open
    chmod -R a+rX reference stories.txt
    try() { # CODE WORDS ARGUMENT...
        local code=$1 words=$2 got=0
        shift 2
        as_nobody "$copy" "$@" > out 2> err < /dev/null || got=$?
        ((got == code)) || { echo "$*: exit code $got: $(cat err)"; return 1; }
        ((code == 0)) || [[ $(wc -l < err) == 1 ]] || { cat err; return 1; }
        ((code == 0)) || grep -q -e "$words" err || { echo "$*: $(cat err)"; return 1; }
    }
    try 1 'error: .*closed.*Permission denied' $small -steps 1 -run closed
    try 1 'error: .*closed/run.*Permission denied' $small -steps 1 -run closed/run
    ends_with 1 in_folder closed as_nobody "$copy" ${small/stories.txt/..\/stories.txt} -steps 1
    [[ $(wc -l < err) == 1 ]]
    holds err 'error: .*runs.*Permission denied'
    cp -r reference closed/reference 2> /dev/null || true # as root
    [[ ! -d closed/reference ]] || {
        try 1 'error: .*Permission denied' -resume -run closed/reference -steps 3
        try 0 '' -generate -load closed/reference # which needs no writing
        try 0 '' -evaluate -load closed/reference
    }
    # Checkpoints that cannot be written: the training goes on, and ends with an error.
    cp -r reference open/run
    chmod -R a+rwX open/run
    chmod 555 open/run/checkpoints
    status=0
    as_nobody "$copy" -resume -run open/run -steps 6 -checkpoint-every 1 > out 2> err || status=$?
    ((status == 1)) || { echo "exit code $status: $(cat err)"; return 1; }
    [[ $(grep -c 'Permission denied; .*; the training goes on$' err) == 1 ]] # of three times
    tail -n 1 err | grep -q '^train_gpt: error: .*Permission denied'
    diff <(ls reference/checkpoints) <(ls open/run/checkpoints)
    chmod 777 open/run/checkpoints
    try 0 '' -resume -run open/run
    # What cannot be read.
    rm -r open/run
    cp -r reference open/run
    chmod -R a+rwX open/run
    chmod a-r open/run/checkpoints/*/model.safetensors
    try 1 'model.safetensors.*Permission denied' -generate -load open/run
    # It is no damage, nor is what cannot be listed nothing: no step is taken, and all stays.
    cp open/run/log.jsonl log
    for way in open/run/checkpoints/step-00000002/model.safetensors open/run/checkpoints/step-00000002 \
        open/run/checkpoints open/run/log.jsonl; do
        chmod -R a+rwX open/run
        chmod a-rwx $way
        try 1 "error: .*${way##*/}.*Permission denied" -resume -run open/run -steps 3
        cmp log open/run/log.jsonl
        diff <(ls reference/checkpoints) <(ls open/run/checkpoints)
    done
    chmod -R a+rwX open/run
    try 0 '' -resume -run open/run -steps 3
    chmod 000 stories.txt
    try 1 'stories.txt.*Permission denied' $small -steps 1 -run open/new
    chmod 644 stories.txt
    [[ ! -e open/new ]]
}
run_as 'folders that cannot be written or read' not_writable

# ---- a limit of memory (ulimit -v), in KiB ----
# One line, and nothing is left of what was begun; an old run that -force had moved aside is back.
out_of_memory() {
    rm -rf run before temporary
    yes abcdefgh | tr -d '\n' | head -c 300000000 | gzip -1 > bomb.txt.gz
    local run="-tokenize -data bomb.txt.gz -vocab 300 -device cpu -threads 2" status=0
    (ulimit -v 600000 && exec "$program" -version) > out 2> err || { echo 'the program needs more than this'; exit 77; }
    (ulimit -v 600000 && exec "$program" $run -run run) > out 2> err || status=$?
    [[ $status == 1 && $(wc -l < err) == 1 && ! -e run ]]
    holds err '^train_gpt: error: out of memory: [0-9]* bytes could not be had; end other'
    "$program" $small -steps 2 -run run > out
    cp -r run before
    (ulimit -v 600000 && exec "$program" $run -run run -force) > out 2> err || status=2
    [[ $status == 2 && $(wc -l < err) == 1 && ! -e run.old-1 ]]
    diff -r -x lock before run
    mkdir temporary
    (ulimit -v 600000 && TMPDIR=$PWD/temporary exec "$program" -evaluate -load run -heldout bomb.txt.gz -threads 2) > out 2> err || status=3
    [[ $status == 3 && $(wc -l < err) -le 2 ]]
    holds err '^train_gpt: error: out of memory: '
    rmdir temporary
    # A plan that does not fit is refused beforehand.
    (ulimit -v 600000 && exec "$program" -dry-run -batch 512 -micro 512 -attention naive) > out 2> err || status=4
    [[ $status == 4 ]]
    holds err '^train_gpt: error: not enough memory: the run needs .*, free are [0-9.]* MB'
}
run_as 'memory that is limited' out_of_memory

# ---- a limit of the size of files (ulimit -f), in KiB ----
small_files() {
    local status=0
    rm -rf run
    (ulimit -f 16 && exec "$program" $small -steps 3 -checkpoint-every 1 -run run) > out 2> err || status=$?
    ((status == 1)) || { echo "exit code $status: $(cat err)"; return 1; }
    grep -q 'File too large.*; the training goes on' err
    grep -q '^train_gpt: error: .*File too large' err
    [[ $(grep -c '"type":"step"' run/log.jsonl) == 3 ]]
    "$program" -resume -run run > out 2> err
    [[ -e run/checkpoints/step-00000003/MANIFEST ]]
}
run_as 'files that may not grow' small_files

# ---- disks ----
read_only_disk() {
    mkdir -p disk
    mount -t tmpfs -o size=16m tmpfs disk
    cp -r reference disk/run
    mkdir disk/empty
    mount -o remount,ro disk
    refused 1 'Read-only file system' $small -steps 1 -run disk/new
    refused 1 'Read-only file system' $small -steps 1 -run disk/empty
    refused 1 'Read-only file system' $small -steps 1 -run disk/run -force
    refused 1 'Read-only file system' -resume -run disk/run -steps 3
    refused 1 'Read-only file system' $text -tokenize -run disk/new
    refused 1 'Read-only file system' $small -compare naive,flash -steps 1 -run disk/new
    ends_with 1 in_folder disk "$program" ${small/stories.txt/..\/stories.txt} -steps 1
    holds err 'runs: Read-only file system'
    done_with -generate -load disk/run
    done_with -evaluate -load disk/run
    done_with -dry-run -run disk/new
    diff -r reference disk/run
}
full_disk() {
    mkdir -p disk
    mount -t tmpfs -o size=1m tmpfs disk
    dd if=/dev/zero of=disk/filler bs=4096 2> dd.output || true
    refused 1 'No space left on device' $small -steps 1 -run disk/new
    refused 1 'No space left on device' $text -tokenize -run disk/new
    answered 1 $small -compare naive,flash -steps 1 -run disk/new
    grep -q 'No space left on device' err
    [[ $(ls disk) == filler ]] # what was begun is gone
    rm disk/filler
    done_with $small -steps 1 -run disk/new
}
run_as 'a read-only disk' in_own_mounts read_only_disk
run_as 'a full disk' in_own_mounts full_disk
# Told when it begins, becomes another failure and ends, however many checkpoints could not be written.
full_for_a_while() {
    mkdir -p disk
    mount -t tmpfs -o size=2m tmpfs disk
    done_with $small -steps 2 -run disk/run
    dd if=/dev/zero of=disk/filler bs=4096 2> dd.output || true
    truncate -s -8192 disk/filler # for the settings and a few rows of the log
    "$program" -resume -run disk/run -steps 1000000000 -checkpoint-every 1 -eval-every 5 -keep 1 > out 2> err &
    local process=$! step
    # shellcheck disable=SC2064 # this one
    trap "kill -KILL $process 2> /dev/null || true" EXIT
    next_steps() { # until the run has taken that many more
        step=$(sed -n 's/.*"step":\([0-9]*\),.*/\1/p' disk/run/log.jsonl | tail -n 1)
        until_step disk/run $((step + $1))
    }
    until_holds err 'the training goes on'
    sleep 0.3 # in which more of them fail
    rm disk/filler
    until_holds err 'again'
    next_steps 20
    mount -t tmpfs -o ro,size=2m tmpfs disk/run/checkpoints
    next_steps 50
    umount -l disk/run/checkpoints
    next_steps 5
    stops TERM $process 143
    cat err
    [[ $(grep -c 'note: no room for a checkpoint .*; the training goes on$' err) == 1 ]]
    [[ $(grep -c 'note: step [0-9]* is saved: checkpoints can be written again$' err) == 2 ]]
    # Two more where it comes in the middle of a save.
    [[ $(grep -c 'Read-only file system.*; the training goes on$' err) == [123] ]]
    [[ $(grep -c 'report.html' err) -le 1 ]]
    lacks err error
}
run_as 'a disk that is full for a while' in_own_mounts full_for_a_while
finish
