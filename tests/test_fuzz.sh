#!/usr/bin/env bash
# test_fuzz.sh - each fuzz target for FUZZ_SECONDS (default 10), two at a time, from its seeds. What is found
# is kept in build/fuzz/found/, and its path printed. Prints a line a target with what was tried, and at last
# "fuzz: N passed, N failed, N skipped". A reproducer by hand: build/fuzz/tests/fuzz/fuzz_<name> FILE.
set -u
seconds=${FUZZ_SECONDS:-10}
found=build/fuzz/found
# In memory where there is such a folder; a target that crashes leaves its own folder in it.
[[ -w /dev/shm ]] && export TMPDIR=/dev/shm
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
export TMPDIR=$tmp
targets=()
for target in tests/fuzz/fuzz_*.c; do targets+=("$(basename "$target" .c)"); done

for target in "${targets[@]}"; do
    if [[ ! -x build/fuzz/tests/fuzz/$target ]]; then
        echo "  skipped: $target is not built; install clang with libFuzzer (dev/setup), then make fuzz"
        echo "fuzz: 0 passed, 0 failed, ${#targets[@]} skipped"
        exit 0
    fi
done

turn() { # TARGET: one turn; its status goes to $tmp/TARGET.status
    local name=${1#fuzz_}
    mkdir -p "$found" "$tmp/$1"
    # A second for an input of 4 KiB is far too long already; a busy machine may take ten times that.
    build/fuzz/tests/fuzz/"$1" -seed="${FUZZ_SEED:-1}" -max_total_time="$seconds" -max_len=4096 \
        -timeout=10 -rss_limit_mb=2048 -print_final_stats=1 -artifact_prefix="$found/$name-" "$tmp/$1" "tests/fuzz/seeds/$name" \
        > "$tmp/$1.output" 2>&1
    echo $? > "$tmp/$1.status"
}

passed=0 failed=0
for ((i = 0; i < ${#targets[@]}; i += 2)); do
    for target in "${targets[@]:i:2}"; do turn "$target" & done
    wait
    for target in "${targets[@]:i:2}"; do
        if [[ $(cat "$tmp/$target.status") == 0 ]]; then
            passed=$((passed + 1))
            runs=$(sed -n 's/^stat::number_of_executed_units: *//p' "$tmp/$target.output")
            edges=$(sed -n 's/.* cov: \([0-9]*\) .*/\1/p' "$tmp/$target.output" | tail -n 1)
            echo "  $target: $runs inputs, $edges edges covered"
        else
            failed=$((failed + 1))
            echo "  FAILED $target"
            # What, where, and the file that shows it.
            grep -a -e ERROR -e 'not so' -e 'runtime error' -e '^ *#[0-9] .* in .*[.]c:' \
                -e 'Test unit written' "$tmp/$target.output" | head -n 20 | sed 's/^/    /'
        fi
    done
done
echo "fuzz: $passed passed, $failed failed, 0 skipped"
[[ $failed == 0 ]]
