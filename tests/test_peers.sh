#!/usr/bin/env bash
# test_peers.sh - the program's figures against a GPT in PyTorch, by tests/peers/check_gpt.py. Takes the program's
# path; ends with "peers: N passed, N failed, N skipped". Skipped where Python or PyTorch is not there.
set -u
build=$(dirname "${1:?usage: test_peers.sh PROGRAM}")
skip() {
    echo "  skipped peers: $1"
    echo "peers: 0 passed, 0 failed, 1 skipped"
    exit
}
command -v python3 >/dev/null || skip "no python3"
python3 -c 'import torch' 2>/dev/null || skip "no PyTorch for python3 (pip install torch)"
python3 "$(dirname "$0")/peers/check_gpt.py" --dump "$build/tests/peers/dump_gpt" | sed 's/^check_gpt:/peers:/'
exit "${PIPESTATUS[0]}"
